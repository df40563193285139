"""Entries of one row while a commit works on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TINY_WEIGHT = 2.0**-24
"""Least weight of an entry in a merge: the smallest attention weight that fp16 can hold."""


@dataclass(frozen=True, eq=False)
class Entries:
    """keys, values [n, D] fp32; bias, score [n] fp32."""

    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor
    score: torch.Tensor

    def __getitem__(self, where: torch.Tensor) -> Entries:
        return Entries(self.keys[where], self.values[where], self.bias[where], self.score[where])
