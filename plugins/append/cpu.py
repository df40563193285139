"""Torch form of `append`: rotary embedding, then K and V into their page slots.

What is the same for every layer of a step (angles, places) is prepared once; a layer then costs a dozen small calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.append.params import AppendParams, AppendStep, Rotary
from plugins.memory import KvMemory


@dataclass(frozen=True, eq=False)
class AppendTables:
    """cos, sin [rows, 1, D] fp32, the sine of the first half negated.

    kv_index [rows * G * 2] int64 into one layer's pages seen as [-1, D]; seen_index [rows * G] into its flat `seen`.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    kv_index: torch.Tensor
    seen_index: torch.Tensor


def prepare(slots: torch.Tensor, rotary: Rotary, pages: torch.Tensor) -> AppendTables:
    """Tables of one step. slots [rows]; rotary: cos, sin [rows, >= D/2] fp32; pages: any layer's, for its shape."""
    _, kv_heads, _, page_tokens, head_dim = pages.shape
    cos, sin = (x[:, None, : head_dim // 2] for x in rotary)
    slots = slots.long()
    page = torch.div(slots, page_tokens, rounding_mode="floor")
    heads = torch.arange(kv_heads, device=slots.device)
    seen_index = (page[:, None] * kv_heads + heads) * page_tokens + (slots - page * page_tokens)[:, None]
    # K of (page, head) starts at row (page * G + head) * 2 * page_tokens, V page_tokens later.
    key_index = seen_index + (page[:, None] * kv_heads + heads) * page_tokens
    kv_index = torch.stack((key_index, key_index + page_tokens), dim=2)
    return AppendTables(
        torch.cat((cos, cos), dim=2), torch.cat((-sin, sin), dim=2), kv_index.view(-1), seen_index.view(-1)
    )


def append_layer(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], tables: AppendTables, pages: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """q [rows, q_heads, D], k and v [rows, G, D] of one layer: see `append`."""
    q, k, v = qkv
    num_q_heads, head_dim = q.shape[1], q.shape[2]
    x = torch.cat((q, k), dim=1).float()
    x = torch.addcmul(x * tables.cos, x.roll(head_dim // 2, dims=2), tables.sin)
    kv = torch.stack((x[:, num_q_heads:].to(pages.dtype), v.to(pages.dtype)), dim=2)
    pages.view(-1, head_dim).index_copy_(0, tables.kv_index, kv.view(-1, head_dim))
    seen.view(-1).index_fill_(0, tables.seen_index, 0)
    return x[:, :num_q_heads].to(q.dtype).contiguous()


def append(params: AppendParams) -> torch.Tensor:
    """Writes K, V and a zero `seen` into each row's slot, in place; returns the rotated q in q's dtype, contiguous."""
    tables = prepare(params.slots, (params.cos, params.sin), params.pages)
    return append_layer((params.q, params.k, params.v), tables, params.pages, params.seen)


class TorchAppend:
    """`plugins.append.params.AppendForm` with torch's operations."""

    def begin(self, slots: torch.Tensor, rotary: Rotary, memory: KvMemory) -> AppendStep:
        tables = prepare(slots, rotary, memory.pages[0])

        def step(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return append_layer((q, k, v), tables, memory.pages[layer], memory.seen[layer])

        return step
