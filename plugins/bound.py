"""Native calls that were given their arguments beforehand.

A step of decoding is some three hundred operations of a few microseconds. To allocate an output for each and to hand
over a dozen arguments takes longer than many of them do; where the tensors are the same in every step, that is done
once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

import torch

Bound = Callable[[], object]
"""Does it all again, on whatever its tensors hold."""


def bound(call: Callable[..., object], *arguments: object, alive: tuple[object, ...]) -> Bound:
    """`call(*arguments)`.   alive: what the addresses among the arguments point into."""
    made = partial(call, *arguments)
    made.alive = alive  # type: ignore[attr-defined]
    return made


@runtime_checkable
class BindsProduct(Protocol):
    """A `plugins.linear.params.Product` that can be bound."""

    num_outputs: int

    def bind(self, x: torch.Tensor, out: torch.Tensor) -> Bound:
        """x [rows, in] contiguous -> out [rows, out] of the same dtype."""
        ...


@runtime_checkable
class BindsRows(Protocol):
    """A `plugins.pointwise.params.Pointwise` that can be bound; arguments as there, results go to `out` and `total`."""

    def bind_rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> Bound: ...

    def bind_add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> Bound:
        """x becomes the sum."""
        ...

    def bind_gated_silu(self, gate_up: torch.Tensor, out: torch.Tensor) -> Bound: ...


def can_bind(step: object) -> Callable[..., Callable[[int], object]] | None:
    """The method `bind` of an `AppendStep` or `AttendStep` whose operation can be bound for the layers of its step.

    It takes (q, k, v, out [rows, q_heads, D]: the rotated q) or (q, out), and gives what takes the layer. None for
    forms without one. Asked in every step: protocols checked at run time take ten times as long.
    """
    return getattr(step, "bind", None)
