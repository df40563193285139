"""The parameters of `append`: one record for a single layer, and what a form offers for the layers of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from plugins.memory import KvMemory

Rotary = tuple[torch.Tensor, torch.Tensor]
AppendStep = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q [rows, q_heads, D], k, v [rows, G, D]) -> rotated q, contiguous; writes the layer's pages and `seen`."""


@dataclass(frozen=True, eq=False)
class AppendParams:
    """q [rows, q_heads, D]; k, v [rows, G, D], fp32/bf16/fp16.

    cos, sin [rows, >= D/2] fp32: the first D/2 columns are used (the second half repeats them).
    slots [rows] int32 or int64: page_id * page_tokens + offset, no slot twice.
    pages [num_pages, G, 2, page_tokens, D] kv_dtype and seen [num_pages, G, page_tokens] fp16: ONE layer's arenas.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    pages: torch.Tensor
    seen: torch.Tensor


class AppendForm(Protocol):
    """A form of `append` for all layers of one step, whose slots and angles are the same in every layer."""

    def begin(self, slots: torch.Tensor, rotary: Rotary, memory: KvMemory) -> AppendStep:
        """slots [rows] int64, cos and sin as in `AppendParams`. The tensors must live as long as the step."""
        ...
