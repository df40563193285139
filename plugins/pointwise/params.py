"""What every form of `pointwise` offers. Tensors are fp32, bf16 or fp16; all is computed in fp32 and rounded once."""

from __future__ import annotations

from typing import Protocol

import torch


class Pointwise(Protocol):
    """The row operations of a layer; inputs are not changed, results are new and contiguous."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [rows, dim], or [rows, heads, dim] with heads side by side; weight [dim] fp32.

        x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019).
        """
        ...

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, delta [rows, dim] contiguous: the sum x + delta in their dtype, and its rms_norm."""
        ...

    def gated_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[rows, 2F] contiguous -> [rows, F]: g / (1 + e^-g) * u of g, u = the two halves."""
        ...
