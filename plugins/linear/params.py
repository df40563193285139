"""What every form of `linear` offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """codes [out, in] int8 and scale [out] fp32: weight = scale * codes."""

    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8Weight:
        """Nearest codes of weight [out, in], each output's largest magnitude being 127; an output of zeros stays so."""
        wide = weight.float()
        scale = wide.abs().amax(dim=1) / 127.0
        codes = (wide / torch.where(scale > 0, scale, 1.0)[:, None]).round_().to(torch.int8)
        return cls(codes, scale)

    def rows(self, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Outputs `index` [n] as [n, in] dtype: the embedding of tokens."""
        return (self.codes[index].float() * self.scale[index][:, None]).to(dtype)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """[out, in] dtype."""
        return (self.codes.float() * self.scale[:, None]).to(dtype)


Weight = torch.Tensor | Int8Weight


class LinearForm(Protocol):
    """Turns a weight into its product. A form may keep the weight in a layout of its own and let go of the tensor."""

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Product:
        """weight [out, in], bias [out]: x [rows, in] contiguous -> x . weight^T + bias [rows, out] in x's dtype."""
        ...

    def logits(self, table: Weight) -> Product:
        """table [vocab, hidden], shared with the embedding: x [rows, hidden] -> x . table^T [rows, vocab] fp32."""
        ...
