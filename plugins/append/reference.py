"""Plain form of `append`: loops over rows and heads, exact in the dtype it is given (float64 in tests)."""

from __future__ import annotations

import torch

from plugins.append.params import AppendParams


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [D], cos and sin [>= D/2] -> [D]: channel pair (i, i + D/2) turned by its angle (RoPE, Su et al. 2021)."""
    half = x.shape[0] // 2
    out = torch.empty_like(x)
    for i in range(half):
        out[i] = x[i] * cos[i] - x[i + half] * sin[i]
        out[i + half] = x[i + half] * cos[i] + x[i] * sin[i]
    return out


def append(params: AppendParams) -> torch.Tensor:
    """Writes K, V and a zero `seen` into each row's slot; returns the rotated q [rows, q_heads, D]."""
    page_tokens = params.pages.shape[3]
    q_out = torch.empty_like(params.q)
    for row, slot in enumerate(params.slots.tolist()):
        page, offset = divmod(slot, page_tokens)
        cos, sin = params.cos[row].to(params.q.dtype), params.sin[row].to(params.q.dtype)
        for head in range(params.q.shape[1]):
            q_out[row, head] = rotate(params.q[row, head], cos, sin)
        for head in range(params.k.shape[1]):
            params.pages[page, head, 0, offset] = rotate(params.k[row, head], cos, sin)
            params.pages[page, head, 1, offset] = params.v[row, head]
            params.seen[page, head, offset] = 0
    return q_out
