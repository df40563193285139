"""The one parameter record of `append`; its reference and torch forms take it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
