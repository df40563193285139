"""Torch form of `append`: rotary embedding, then K and V into their page slots."""

from __future__ import annotations

import torch

from plugins.append.params import AppendParams


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, D], cos and sin [rows, 1, D/2] fp32 -> [rows, heads, D] fp32."""
    half = x.shape[-1] // 2
    low, high = x[..., :half].float(), x[..., half:].float()
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def append(params: AppendParams) -> torch.Tensor:
    """Writes K, V and a zero `seen` into each row's slot, in place; returns the rotated q in q's dtype, contiguous."""
    q, k, pages, seen = params.q, params.k, params.pages, params.seen
    num_q_heads, half = q.shape[1], q.shape[2] // 2
    cos, sin = params.cos[:, None, :half], params.sin[:, None, :half]
    rotated = rotate(torch.cat((q, k), dim=1), cos, sin)
    kv = torch.stack((rotated[:, num_q_heads:].to(pages.dtype), params.v.to(pages.dtype)), dim=2)
    page_tokens = pages.shape[3]
    page_ids = torch.div(params.slots, page_tokens, rounding_mode="floor")
    offsets = params.slots - page_ids * page_tokens
    pages.permute(0, 3, 1, 2, 4)[page_ids, offsets] = kv
    seen.permute(0, 2, 1)[page_ids, offsets] = 0
    return rotated[:, :num_q_heads].to(q.dtype).contiguous()
