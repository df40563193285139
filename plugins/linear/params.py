"""What every form of `linear` offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Product = Callable[[torch.Tensor], torch.Tensor]


class LinearForm(Protocol):
    """Turns a weight into its product. A form may keep the weight in a layout of its own and let go of the tensor."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """weight [out, in], bias [out]: x [rows, in] contiguous -> x . weight^T + bias [rows, out] in x's dtype."""
        ...

    def logits(self, table: torch.Tensor) -> Product:
        """table [vocab, hidden], shared with the embedding: x [rows, hidden] -> x . table^T [rows, vocab] fp32."""
        ...
