"""Committed blocks, as rows of int32 words, turned into keys, values and biases by plain layers.

`plugins.layout` has the geometry, `plugins.blocks` the same on bytes. Layers know neither bytes nor bit casts, so a
word is halved by whole-number division, and 16 bits become what they stand for, a number or some codes, through a table
of all 65,536. B blocks of E entries, D head size, W words of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from builder.layers import Layers
from plugins.blocks import VALUE_DTYPES
from plugins.layout import BlockLayout

T = TypeVar("T")

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
        widths = sorted({layout.k_bits, layout.v_bits}) if layout.quantized else []
        self._code_tables = {bits: layers.constant(_code_table(bits), "real") for bits in widths}

    def read(self, words: T) -> Entries[T]:
        """words [B, W] int32."""
        n, layout, entries, size = self._l, self._layout, self._layout.block_entries, self._layout.head_dim
        halves = self._halves(words)
        if not layout.quantized:
            keys, values = (
                n.reshape(n.gather(self._value_table, self._part(halves, at, entries * size)), (0, entries, size))
                for at in (layout.k_codes, layout.v_codes)
            )
            return Entries(keys, values, n.gather(self._half_table, self._part(halves, layout.bias, entries)))
        # Scales, minima and biases lie side by side, so one look at the table serves them all.
        count = (layout.block_bytes - layout.k_scale) // HALF_BYTES
        numbers = n.gather(self._half_table, self._part(halves, layout.k_scale, count))

        def number(at: int, count: int, shape: tuple[int, ...]) -> T:
            return n.reshape(self._part(numbers, at - layout.k_scale, count), shape)

        keys = n.mul(self._codes(halves, layout.k_codes, layout.k_bits), number(layout.k_scale, size, (0, 1, size)))
        values = self._codes(halves, layout.v_codes, layout.v_bits)
        values = n.mul(values, number(layout.v_scale, entries, (0, entries, 1)))
        return Entries(
            keys=n.add(keys, number(layout.k_min, size, (0, 1, size))),
            values=n.add(values, number(layout.v_min, entries, (0, entries, 1))),
            bias=self._part(numbers, layout.bias - layout.k_scale, entries),
        )

    def _halves(self, words: T) -> T:
        """[B, 2 W] int32, 0 to 65,535: the lower half of a word comes first."""
        n, width = self._l, self._l.size(words, 1)
        # The low 31 bits and the highest one apart, so that division never meets a negative number.
        negative = n.less(words, self._int(0))
        rest = n.select(negative, n.sub(words, self._int(INT32_MIN)), words)
        high = n.div(rest, self._int(1 << 16))
        low = n.sub(rest, n.mul(high, self._int(1 << 16)))
        high = n.select(negative, n.add(high, self._int(1 << 15)), high)
        pairs = n.concat([n.reshape(part, (0, width, 1)) for part in (low, high)], axis=2)
        return n.reshape(pairs, (0, 2 * width))

    def _part(self, halves: T, at: int, count: int) -> T:
        """[B, count] from byte `at` on."""
        return self._l.part(halves, 1, at // HALF_BYTES, count)

    def _codes(self, halves: T, at: int, bits: int) -> T:
        """[B, E, D] real, whole numbers, from byte `at` on."""
        n, entries, size = self._l, self._layout.block_entries, self._layout.head_dim
        found = n.gather(self._code_tables[bits], self._part(halves, at, entries * size * bits // 16))
        if bits == 8:  # [B, E * D / 2, 2]: channels 2 i and 2 i + 1
            return n.reshape(found, (0, entries, size))
        # [B, E * D / 4, 2, 2]: (low or high nibble, byte). Bytes i of a row hold channels i (low) and i + D / 2 (high).
        rows = n.reshape(found, (0, entries, size // 4, 2, 2))
        return n.reshape(rows, (0, entries, size), first=(0, 1, 3, 2, 4))

    def _int(self, value: int, rank: int = 2) -> T:
        return self._l.constant(torch.full((1,) * rank, value, dtype=torch.int32), "int32")


def _table(dtype: torch.dtype) -> torch.Tensor:
    """[65536] fp32: the number that each pattern of 16 bits stands for in fp16 or bf16."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    return bits.to(torch.int16).view(dtype).float().nan_to_num(0.0, 0.0, 0.0)


def _code_table(bits: int) -> torch.Tensor:
    """The codes in each pattern of 16 bits: [65536, 2] bytes, or [65536, 2, 2] nibbles, low ones first."""
    patterns = torch.arange(1 << 16)
    by_byte = torch.stack((patterns & 255, patterns >> 8), dim=1)
    if bits == 8:
        return by_byte.float()
    return torch.stack((by_byte & 15, by_byte >> 4), dim=1).float()
