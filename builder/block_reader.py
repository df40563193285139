"""Committed blocks, as rows of int32 words, turned into keys, values and biases by plain layers.

`plugins.layout` has the geometry, `plugins.blocks` the same on bytes. Layers know neither bytes nor bit casts, so a
word is taken apart by whole-number division, and 16 bits become the number they stand for through a table of all
65,536. B blocks of E entries, D head size, W words of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from builder.layers import Layers
from plugins.blocks import VALUE_DTYPES
from plugins.layout import BlockLayout

T = TypeVar("T")

WORD_BYTES = 4
HALF_BYTES = 2
INT32_MIN = -(1 << 31)


@dataclass(frozen=True, eq=False)
class Entries(Generic[T]):
    """keys, values [B, E, D] and bias [B, E], real. Unfilled entries hold anything finite."""

    keys: T
    values: T
    bias: T


class BlockReader(Generic[T]):
    """Numbers that are not finite read as 0: only unfilled entries hold them."""

    def __init__(self, layers: Layers[T], layout: BlockLayout) -> None:
        self._l, self._layout = layers, layout
        self._half_table = layers.constant(_table(torch.float16), "real")
        self._value_table = self._half_table
        if layout.format == "bf16":
            self._value_table = layers.constant(_table(VALUE_DTYPES["bf16"]), "real")

    def read(self, words: T) -> Entries[T]:
        """words [B, W] int32."""
        n, layout, entries, size = self._l, self._layout, self._layout.block_entries, self._layout.head_dim
        found = self._bytes(words)
        if not layout.quantized:
            keys, values = (
                n.reshape(
                    n.gather(self._value_table, self._sixteen_bits(found, at, entries * size)), (0, entries, size)
                )
                for at in (layout.k_codes, layout.v_codes)
            )
            return Entries(keys, values, n.gather(self._half_table, self._sixteen_bits(found, layout.bias, entries)))
        # Scales, minima and biases lie side by side, so one look at the table serves them all.
        halves = n.gather(
            self._half_table,
            self._sixteen_bits(found, layout.k_scale, (layout.block_bytes - layout.k_scale) // HALF_BYTES),
        )

        def half(at: int, count: int, shape: tuple[int, ...]) -> T:
            return n.reshape(n.part(halves, 1, (at - layout.k_scale) // HALF_BYTES, count), shape)

        keys = n.mul(self._codes(found, layout.k_codes, layout.k_bits), half(layout.k_scale, size, (0, 1, size)))
        values = n.mul(
            self._codes(found, layout.v_codes, layout.v_bits), half(layout.v_scale, entries, (0, entries, 1))
        )
        return Entries(
            keys=n.add(keys, half(layout.k_min, size, (0, 1, size))),
            values=n.add(values, half(layout.v_min, entries, (0, entries, 1))),
            bias=half(layout.bias, entries, (0, entries)),
        )

    def _bytes(self, words: T) -> T:
        """[B, 4 W] int32, 0 to 255: word w holds bytes 4 w to 4 w + 3, lowest first."""
        n, width = self._l, self._l.size(words, 1)
        # The low 31 bits and the highest one (1 or 0) apart, so that division never meets a negative number.
        negative = n.less(words, self._int(0))
        rest = n.select(negative, n.sub(words, self._int(INT32_MIN)), words)
        found = []
        for _ in range(3):
            quotient = n.div(rest, self._int(256))
            found.append(n.sub(rest, n.mul(quotient, self._int(256))))
            rest = quotient
        found.append(n.add(rest, n.select(negative, self._int(128), self._int(0))))
        side_by_side = n.concat([n.reshape(part, (0, width, 1)) for part in found], axis=2)
        return n.reshape(side_by_side, (0, WORD_BYTES * width))

    def _codes(self, found: T, at: int, bits: int) -> T:
        """[B, E, D] real, whole numbers, of bytes [B, ...] from `at` on."""
        n, entries, size = self._l, self._layout.block_entries, self._layout.head_dim
        row_bytes = size * bits // 8
        rows = n.reshape(n.part(found, 1, at, entries * row_bytes), (0, entries, row_bytes))
        if bits == 4:
            high = n.div(rows, self._int(16, rank=3))
            rows = n.concat((n.sub(rows, n.mul(high, self._int(16, rank=3))), high), axis=2)
        return n.cast(rows, "real")

    def _sixteen_bits(self, found: T, at: int, count: int) -> T:
        """[B, count] int32, 0 to 65,535, of bytes [B, ...] from `at` on."""
        n = self._l
        pairs = n.reshape(n.part(found, 1, at, HALF_BYTES * count), (0, count, HALF_BYTES))
        weights = n.constant(torch.tensor([[[1, 256]]]), "int32")
        return n.reshape(n.reduce_sum(n.mul(pairs, weights), (2,)), (0, count))

    def _int(self, value: int, rank: int = 2) -> T:
        return self._l.constant(torch.full((1,) * rank, value, dtype=torch.int32), "int32")


def _table(dtype: torch.dtype) -> torch.Tensor:
    """[65536] fp32: the number that each pattern of 16 bits stands for in fp16 or bf16."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    return bits.to(torch.int16).view(dtype).float().nan_to_num(0.0, 0.0, 0.0)
