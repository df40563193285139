"""The layers of a step of few rows, as native calls over tensors of their own that are made once.

The first step of so many rows writes down what the model does; later ones do it again. What differs from step to step,
where K and V go and what attention reads, is asked of the step. Same kernels, same bits; a step of decoding loses the
milliseconds that three hundred allocations and lists of arguments took.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from builder.model import DecoderModel
from plugins.bound import BindsProduct, BindsRows, Bound
from plugins.linear.params import Product
from plugins.pointwise.params import Pointwise

# Steps of more rows are bound by their products.
MAX_ROWS = 16

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Rotary = tuple[torch.Tensor, torch.Tensor]
PerLayer = Callable[[int], object]


class BindsKv(Protocol):
    """A `builder.lower_torch.KvStep` whose operations can be bound for the layers of its step: `plugins.bound`."""

    def bind(
        self, qkv: Heads, rotary: Rotary, rotated: torch.Tensor, out: torch.Tensor
    ) -> tuple[PerLayer, PerLayer] | None:
        """`append` of q, k, v [rows, heads, D] to `rotated`, and `attend` of that to `out`, both [rows, q_heads, D].

        None, with nothing done, where this step needs them otherwise.
        """
        ...


@dataclass(frozen=True, eq=False)
class Parts:
    """What a decoder is made of.   dtype: of activations."""

    model: DecoderModel
    products: Mapping[str, Product]
    norms: Mapping[str, torch.Tensor]
    pointwise: Pointwise
    dtype: torch.dtype

    @property
    def can_be_recorded(self) -> bool:
        layered = (self.products[name] for names in self.model.layers for name in (names.qkv, names.output,
                   names.gate_up, names.down))  # fmt: skip
        return isinstance(self.pointwise, BindsRows) and all(isinstance(one, BindsProduct) for one in layered)


class RecordedStep:
    """`DecoderModel.hidden` for steps of `num_rows` rows, of parts that can be recorded."""

    def __init__(self, parts: Parts, num_rows: int) -> None:
        self._recorder = Recorder(parts, num_rows)
        self._hidden = parts.model.hidden(self._recorder)

    def run(self, embedded: torch.Tensor, rotary: Rotary, kv: object) -> torch.Tensor | None:
        """[rows, hidden] of the last layer, which the next run writes over; None where `kv` has to be called otherwise.

        embedded [rows, hidden]: the rows' embeddings.   kv: see `BindsKv`.
        """
        made, bind = self._recorder, getattr(kv, "bind", None)
        bound = None if bind is None else bind(made.heads, rotary, made.rotated, made.attended)
        if bound is None:
            return None
        made.per_layer = bound
        made.embedded.copy_(embedded)
        for call in made.calls:
            call()
        return self._hidden


class Recorder:
    """`builder.model.Ops` that computes nothing: it binds every operation to tensors and writes it down.

    Results of one operation and shape share a tensor: none is read any more when the next is written. So q, k, v and
    what attention gives lie in the same place in every layer.
    """

    heads: Heads
    rotated: torch.Tensor
    attended: torch.Tensor
    per_layer: tuple[PerLayer, PerLayer]

    def __init__(self, parts: Parts, num_rows: int) -> None:
        assert isinstance(parts.pointwise, BindsRows)
        self._parts, self._pointwise, self._num_rows = parts, parts.pointwise, num_rows
        self._eps = parts.model.spec.rms_eps
        self._made: dict[tuple[str, int, tuple[int, ...]], torch.Tensor] = {}
        self.embedded = self._tensor("embed", parts.model.spec.hidden_size)
        self.calls: list[Bound] = []

    def _tensor(self, operation: str, *shape: int, of: int = 0) -> torch.Tensor:
        """of: where the input lies, for operations that have several of one shape at a time."""
        key = (operation, of, shape)
        if key not in self._made:
            self._made[key] = torch.empty((self._num_rows, *shape), dtype=self._parts.dtype)
        return self._made[key]

    def embed(self, weight: str) -> torch.Tensor:
        return self.embedded

    def linear(self, x: torch.Tensor, weight: str, bias: str | None) -> torch.Tensor:
        product = self._parts.products[weight]
        assert isinstance(product, BindsProduct)
        out = self._tensor("linear", product.num_outputs)
        assert out is not x
        self.calls.append(product.bind(x, out))
        return out

    def rms_norm(self, x: torch.Tensor, weight: str) -> torch.Tensor:
        out = self._tensor("norm", *x.shape[1:], of=x.data_ptr() if x.dim() == 3 else 0)  # q and k may be as wide
        self.calls.append(self._pointwise.bind_rms_norm(x, self._parts.norms[weight], self._eps, out))
        return out

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self.calls.append(partial(a.add_, b))
        return a

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, weight: str) -> tuple[torch.Tensor, torch.Tensor]:
        out = self._tensor("norm", *x.shape[1:])
        self.calls.append(self._pointwise.bind_add_norm(x, delta, self._parts.norms[weight], self._eps, out))
        return x, out

    def gated_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = self._tensor("gated_silu", gate_up.shape[1] // 2)
        self.calls.append(self._pointwise.bind_gated_silu(gate_up, out))
        return out

    def split_heads(self, qkv: torch.Tensor) -> Heads:
        spec = self._parts.model.spec
        heads = qkv.view(self._num_rows, -1, spec.head_dim)
        q, k, v = heads.split_with_sizes([spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
        return q, k, v

    def append(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        places = [x.data_ptr() for x in (q, k, v)]
        assert layer == 0 or places == [x.data_ptr() for x in self.heads], "a layer has its q, k and v elsewhere"
        self.heads, self.rotated = (q, k, v), self._tensor("append", *q.shape[1:])
        self.calls.append(lambda: self.per_layer[0](layer))
        return self.rotated

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        self.attended = self._tensor("attend", *q.shape[1:])
        self.calls.append(lambda: self.per_layer[1](layer))
        return self.attended.view(self._num_rows, -1)

    def take_rows(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("logits are not recorded")

    def logits(self, x: torch.Tensor, weight: str) -> torch.Tensor:
        raise AssertionError("logits are not recorded")
