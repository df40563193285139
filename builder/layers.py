"""The layers that a network is composed of, and their torch form.

`builder.lower_trt` and `builder.native_ops` write the decoder against `Layers` once. `builder.trt_layers` adds each
call to a TensorRT network; `TorchLayers` runs it at once, so the composition is checked as numbers where no GPU can
run the plan. A layer's inputs have the same rank; sizes of 1 repeat (broadcast).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

import torch

T = TypeVar("T")

Kind = Literal["real", "model", "kv", "fp16", "int32"]
"""real: the type sums are taken in (fp32).   model, kv: the engine's dtype and kv_dtype."""

Axes = Sequence[int]


class Layers(Protocol[T]):
    """Reduced axes are kept with size 1."""

    def constant(self, values: torch.Tensor, kind: Kind) -> T: ...

    def rank(self, x: T) -> int: ...

    def size(self, x: T, axis: int) -> int:
        """Of an axis that does not change from step to step."""
        ...

    def cast(self, x: T, kind: Kind) -> T: ...

    def reshape(self, x: T, shape: Sequence[int], first: Axes = (), then: Axes = ()) -> T:
        """0 keeps the size of that axis, -1 (at most one) takes what is left.

        first, then: order of axes before and after, where it changes. One layer in all.
        """
        ...

    def part(self, x: T, axis: int, start: int, size: int) -> T:
        """x[..., start : start + size, ...] along `axis`."""
        ...

    def take(self, x: T, axis: int, index: int) -> T:
        """x[..., index, ...]: without `axis`."""
        ...

    def concat(self, parts: Sequence[T], axis: int) -> T: ...

    def gather(self, x: T, index: T, axis: int = 0) -> T:
        """Entries `index` (int32, any rank) along `axis`: the index's axes replace that axis."""
        ...

    def gather_at(self, x: T, index: T) -> T:
        """x[index[..., :]]; index [..., n] int32 names the first n axes of x."""
        ...

    def scatter(self, x: T, index: T, updates: T) -> T:
        """x with x[index[..., :]] = updates[...]; index [..., n] int32 names the first n axes of x."""
        ...

    def add(self, a: T, b: T) -> T: ...

    def sub(self, a: T, b: T) -> T: ...

    def mul(self, a: T, b: T) -> T: ...

    def div(self, a: T, b: T) -> T:
        """Of reals; of int32 the quotient rounded down."""
        ...

    def maximum(self, a: T, b: T) -> T: ...

    def less(self, a: T, b: T) -> T: ...

    def equal(self, a: T, b: T) -> T: ...

    def both(self, a: T, b: T) -> T:
        """Logical and."""
        ...

    def select(self, condition: T, a: T, b: T) -> T: ...

    def exp(self, x: T) -> T: ...

    def log(self, x: T) -> T: ...

    def sqrt(self, x: T) -> T: ...

    def cos(self, x: T) -> T: ...

    def sin(self, x: T) -> T: ...

    def sigmoid(self, x: T) -> T: ...

    def matmul(self, a: T, b: T, transpose_b: bool = False) -> T: ...

    def reduce_max(self, x: T, axes: Sequence[int]) -> T: ...

    def reduce_sum(self, x: T, axes: Sequence[int]) -> T: ...

    def reduce_mean(self, x: T, axes: Sequence[int]) -> T: ...

    def sum_before(self, x: T) -> T:
        """x [n] int32 -> [n] int32: the sum of the entries before each one."""
        ...


class TorchLayers:
    """`Layers` on tensors. `real` may be float64, which then leaves only the composition to be right."""

    def __init__(self, model: torch.dtype, kv: torch.dtype, real: torch.dtype = torch.float32) -> None:
        self._dtypes: dict[Kind, torch.dtype] = {
            "real": real, "model": model, "kv": kv, "fp16": torch.float16, "int32": torch.int32,
        }  # fmt: skip

    def constant(self, values: torch.Tensor, kind: Kind) -> torch.Tensor:
        return values.to(self._dtypes[kind])

    def rank(self, x: torch.Tensor) -> int:
        return x.dim()

    def size(self, x: torch.Tensor, axis: int) -> int:
        return x.shape[axis]

    def cast(self, x: torch.Tensor, kind: Kind) -> torch.Tensor:
        return x.to(self._dtypes[kind])

    def reshape(self, x: torch.Tensor, shape: Sequence[int], first: Axes = (), then: Axes = ()) -> torch.Tensor:
        x = x.permute(*first) if first else x
        x = x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(shape)])
        return x.permute(*then) if then else x

    def part(self, x: torch.Tensor, axis: int, start: int, size: int) -> torch.Tensor:
        return x.narrow(axis, start, size)

    def take(self, x: torch.Tensor, axis: int, index: int) -> torch.Tensor:
        return x.select(axis, index)

    def concat(self, parts: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
        return torch.cat(tuple(parts), dim=axis)

    def gather(self, x: torch.Tensor, index: torch.Tensor, axis: int = 0) -> torch.Tensor:
        shape = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
        return x.index_select(axis, index.reshape(-1)).reshape(shape)

    def gather_at(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x[tuple(index.long().unbind(-1))]

    def scatter(self, x: torch.Tensor, index: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
        assert updates.dtype == x.dtype
        out = x.clone()
        out[tuple(index.long().unbind(-1))] = updates
        return out

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _same(a, b) + b

    def sub(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _same(a, b) - b

    def mul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _same(a, b) * b

    def div(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.div(_same(a, b), b, rounding_mode="floor" if a.dtype == torch.int32 else None)

    def maximum(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.maximum(_same(a, b), b)

    def less(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _same(a, b) < b

    def equal(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _same(a, b) == b

    def both(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _same(a, b) & b

    def select(self, condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert condition.dtype == torch.bool and condition.dim() == a.dim()
        return torch.where(condition, _same(a, b), b)

    def exp(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    def log(self, x: torch.Tensor) -> torch.Tensor:
        return x.log()

    def sqrt(self, x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()

    def cos(self, x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    def sin(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        return x.sigmoid()

    def matmul(self, a: torch.Tensor, b: torch.Tensor, transpose_b: bool = False) -> torch.Tensor:
        return _same(a, b) @ (b.mT if transpose_b else b)

    def reduce_max(self, x: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        return x.amax(dim=tuple(axes), keepdim=True)

    def reduce_sum(self, x: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        return x.sum(dim=tuple(axes), keepdim=True)

    def reduce_mean(self, x: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        return x.mean(dim=tuple(axes), keepdim=True)

    def sum_before(self, x: torch.Tensor) -> torch.Tensor:
        return (x.cumsum(0) - x).to(torch.int32)


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a, once it is sure that a strongly typed network would take the pair as well."""
    assert a.dtype == b.dtype, f"{a.dtype} with {b.dtype}"
    assert a.dim() == b.dim(), f"rank {a.dim()} with {b.dim()}"
    return a
