"""Torch form of `pointwise`."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class TorchPointwise:
    """`plugins.pointwise.params.Pointwise` with torch's own operations, on any device."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        square_sum: torch.Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        scale = square_sum.div_(x.shape[-1]).add_(eps).rsqrt_()
        return (wide * scale).mul_(weight).to(x.dtype)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + delta
        return total, self.rms_norm(total, weight, eps)

    def gated_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
