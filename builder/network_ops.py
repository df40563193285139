"""The decoder's operations (`builder.model.Ops`) as layers, for a TensorRT network or, in tests, for torch.

Everything but `append` and `attend`, which come in two forms (`KvForm`). Norms, rotary angles, the gate and logits are
computed in fp32, products in the engine's dtype; roundings stand where `builder.lower_torch` has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

import torch

from builder.layers import Layers
from builder.native_ops import Arenas, NativeOps
from builder.native_tables import Geometry, Tables
from builder.rope import inverse_frequencies
from runtime.config import ModelSpec

T = TypeVar("T")

Rotary = tuple[T, T]
"""cos, sin [R, D / 2] real, attention factor included; the same for all layers."""


class KvForm(Protocol[T]):
    """A form of the operations on the KV arenas, for one step. Called in layer order, `append` before `attend`."""

    def append(self, layer: int, qkv: tuple[T, T, T], rotary: Rotary[T]) -> T:
        """q [R, Q, D], k and v [R, G, D] -> the rotated q."""
        ...

    def attend(self, layer: int, q: T) -> T:
        """[R, Q, D] -> [R, Q, D]."""
        ...

    def arenas(self) -> Mapping[str, T]:
        """The arenas after the step, by the output names of `runtime.engine_interface`."""
        ...


class NativeForm(Generic[T]):
    """`KvForm` of plain layers over the inputs of a step, by name."""

    def __init__(self, layers: Layers[T], geometry: Geometry, inputs: Mapping[str, T]) -> None:
        self._l = layers
        self._native = NativeOps(layers, geometry, Tables(**{name: inputs[name] for name in Tables.__annotations__}))
        self._arenas = dict(inputs)
        self._entry_weights: list[T] = []

    def append(self, layer: int, qkv: tuple[T, T, T], rotary: Rotary[T]) -> T:
        q, k, v = qkv
        pages, seen = f"pages_{layer}", f"seen_{layer}"
        q, k = rotate(self._l, q, rotary), rotate(self._l, k, rotary)
        stored = self._native.append(k, v, self._arenas[pages], self._arenas[seen])
        self._arenas[pages], self._arenas[seen] = stored
        return q

    def attend(self, layer: int, q: T) -> T:
        pages, seen = f"pages_{layer}", f"seen_{layer}"
        attended = self._native.attend(layer, q, Arenas(*(self._arenas[name] for name in (pages, seen, "blocks"))))
        self._arenas[seen] = attended.raised.seen
        self._entry_weights.append(attended.raised.entry_weights)
        return attended.out

    def arenas(self) -> Mapping[str, T]:
        self._arenas["score"] = self._native.raise_score(self._arenas["score"], self._entry_weights)
        return {f"{name}_out": self._arenas[name] for name in self._arenas}


def rotate(layers: Layers[T], x: T, rotary: Rotary[T]) -> T:
    """x [R, heads, D] model: channel i turns with i + D / 2 by the row's angles, in fp32."""
    n = layers
    heads, half = n.size(x, 1), n.size(x, 2) // 2
    cos, sin = (n.reshape(table, (0, 1, half)) for table in rotary)
    halves = n.reshape(n.cast(x, "real"), (0, heads, 2, half))
    first, second = (n.take(halves, 2, i) for i in range(2))
    turned = (n.sub(n.mul(first, cos), n.mul(second, sin)), n.add(n.mul(second, cos), n.mul(first, sin)))
    return n.cast(n.concat(turned, axis=2), "model")


class NetworkOps(Generic[T]):
    """`builder.model.Ops`. Weights are named and shaped as in `builder.model.weight_recipes`, norms in fp32."""

    def __init__(
        self,
        layers: Layers[T],
        spec: ModelSpec,
        weights: Mapping[str, torch.Tensor],
        inputs: Mapping[str, T],
        kv: KvForm[T],
    ) -> None:
        self._l, self._spec, self._weights, self._inputs, self._kv = layers, spec, weights, inputs, kv
        self._tables: dict[str, T] = {}
        self._rotary = self._angles(inputs["positions"])

    def _angles(self, positions: T) -> Rotary[T]:
        n, rope = self._l, self._spec.rope
        frequencies = n.constant(inverse_frequencies(rope, self._spec.head_dim)[None], "real")
        angles = n.mul(n.reshape(n.cast(positions, "real"), (-1, 1)), frequencies)
        factor = n.constant(torch.full((1, 1), rope.attention_factor), "real")
        return n.mul(n.cos(angles), factor), n.mul(n.sin(angles), factor)

    def _matrix(self, weight: str) -> T:
        """One constant however often it is used: the embedding may be the head as well."""
        if weight not in self._tables:
            self._tables[weight] = self._l.constant(self._weights[weight], "model")
        return self._tables[weight]

    def embed(self, weight: str) -> T:
        return self._l.gather(self._matrix(weight), self._inputs["token_ids"])

    def linear(self, x: T, weight: str, bias: str | None) -> T:
        product = self._l.matmul(x, self._matrix(weight), transpose_b=True)
        if bias is None:
            return product
        return self._l.add(product, self._l.constant(self._weights[bias][None], "model"))

    def rms_norm(self, x: T, weight: str) -> T:
        n, rank = self._l, self._l.rank(x)
        wide = n.cast(x, "real")
        mean = n.reduce_mean(n.mul(wide, wide), (rank - 1,))
        root = n.sqrt(n.add(mean, self._real(self._spec.rms_eps, rank)))
        scale = n.constant(self._weights[weight].view(*(1,) * (rank - 1), -1), "real")
        return n.cast(n.mul(n.div(wide, root), scale), "model")

    def add(self, a: T, b: T) -> T:
        return self._l.add(a, b)

    def add_norm(self, x: T, delta: T, weight: str) -> tuple[T, T]:
        total = self._l.add(x, delta)
        return total, self.rms_norm(total, weight)

    def gated_silu(self, gate_up: T) -> T:
        n, size = self._l, self._spec.ffn_size
        halves = n.reshape(n.cast(gate_up, "real"), (0, 2, size))
        gate, up = (n.take(halves, 1, i) for i in range(2))
        return n.cast(n.mul(n.mul(gate, n.sigmoid(gate)), up), "model")

    def split_heads(self, qkv: T) -> tuple[T, T, T]:
        n, spec = self._l, self._spec
        counts = (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
        heads = n.reshape(qkv, (0, sum(counts), spec.head_dim))
        q, k, v = (n.part(heads, 1, sum(counts[:i]), counts[i]) for i in range(3))
        return q, k, v

    def append(self, layer: int, q: T, k: T, v: T) -> T:
        return self._kv.append(layer, (q, k, v), self._rotary)

    def attend(self, layer: int, q: T) -> T:
        width = self._spec.num_q_heads * self._spec.head_dim
        return self._l.reshape(self._kv.attend(layer, q), (0, width))

    def take_rows(self, x: T) -> T:
        return self._l.gather(x, self._inputs["logit_rows"])

    def logits(self, x: T, weight: str) -> T:
        return self._l.cast(self._l.matmul(x, self._matrix(weight), transpose_b=True), "real")

    def _real(self, value: float, rank: int) -> T:
        return self._l.constant(torch.full((1,) * rank, value), "real")
