"""Committed blocks, as rows of int32 words, turned into keys, values and biases by plain layers.

`plugins.layout` has the geometry, `plugins.blocks` the same on bytes. Layers know neither bytes nor bit casts, so a
word is taken apart by whole-number division, and 16 bits become the number they stand for through a table of all
65,536.
B blocks of E entries, D head size, W words of a block.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

from builder.layers import Layers
from plugins.blocks import VALUE_DTYPES
from plugins.layout import BlockLayout

T = TypeVar("T")

WORD_BYTES = 4
INT32_MIN = -(1 << 31)


class BlockReader(Generic[T]):
    """Reads words [B, W] int32. Numbers that are not finite read as 0: only unfilled entries hold them."""

    def __init__(self, layers: Layers[T], layout: BlockLayout) -> None:
        self._l, self._layout = layers, layout
        self._half_table = layers.constant(_table(torch.float16), "real")
        values = VALUE_DTYPES[layout.format] if not layout.quantized else torch.float16
        self._value_table = self._half_table if values is torch.float16 else layers.constant(_table(values), "real")

    def keys(self, words: T) -> T:
        """[B, E, D] real. Unfilled entries hold anything finite."""
        n, layout = self._l, self._layout
        if not layout.quantized:
            return self._values_at(words, layout.k_codes)
        codes = self._codes(words, layout.k_codes, layout.k_bits)
        scale, minimum = (
            n.reshape(self._halves(words, at, layout.head_dim), (0, 1, layout.head_dim))
            for at in (layout.k_scale, layout.k_min)
        )
        return n.add(n.mul(codes, scale), minimum)

    def values(self, words: T) -> T:
        """[B, E, D] real. Unfilled entries hold anything finite."""
        n, layout = self._l, self._layout
        if not layout.quantized:
            return self._values_at(words, layout.v_codes)
        codes = self._codes(words, layout.v_codes, layout.v_bits)
        scale, minimum = (
            n.reshape(self._halves(words, at, layout.block_entries), (0, layout.block_entries, 1))
            for at in (layout.v_scale, layout.v_min)
        )
        return n.add(n.mul(codes, scale), minimum)

    def bias(self, words: T) -> T:
        """[B, E] real."""
        return self._halves(words, self._layout.bias, self._layout.block_entries)

    def _values_at(self, words: T, at: int) -> T:
        layout = self._layout
        bits = self._sixteen_bits(words, at, layout.block_entries * layout.head_dim)
        return self._l.reshape(self._l.gather(self._value_table, bits), (0, layout.block_entries, layout.head_dim))

    def _halves(self, words: T, at: int, count: int) -> T:
        """[B, count] real of fp16 numbers."""
        return self._l.gather(self._half_table, self._sixteen_bits(words, at, count))

    def _codes(self, words: T, at: int, bits: int) -> T:
        """[B, E, D] real, whole numbers."""
        n, entries, size = self._l, self._layout.block_entries, self._layout.head_dim
        row_bytes = size * bits // 8
        found = n.reshape(self._bytes(words, at, entries * row_bytes), (0, entries, row_bytes))
        if bits == 4:
            high = n.div(found, self._int(16, rank=3))
            low = n.sub(found, n.mul(high, self._int(16, rank=3)))
            found = n.concat((low, high), axis=2)
        return n.cast(found, "real")

    def _bytes(self, words: T, at: int, count: int) -> T:
        """[B, count] int32, 0 to 255: word w holds bytes 4 w to 4 w + 3, lowest first."""
        n = self._l
        rest, sign = self._unsigned(n.part(words, 1, at // WORD_BYTES, count // WORD_BYTES))
        found = []
        for _ in range(3):
            quotient = n.div(rest, self._int(256))
            found.append(n.sub(rest, n.mul(quotient, self._int(256))))
            rest = quotient
        found.append(n.add(rest, n.mul(sign, self._int(128))))
        return self._interleave(found, count)

    def _sixteen_bits(self, words: T, at: int, count: int) -> T:
        """[B, count] int32, 0 to 65,535."""
        n = self._l
        rest, sign = self._unsigned(n.part(words, 1, at // WORD_BYTES, count * 2 // WORD_BYTES))
        high = n.div(rest, self._int(1 << 16))
        low = n.sub(rest, n.mul(high, self._int(1 << 16)))
        return self._interleave([low, n.add(high, n.mul(sign, self._int(1 << 15)))], count)

    def _unsigned(self, words: T) -> tuple[T, T]:
        """The low 31 bits and the highest one (1 or 0), so that division never meets a negative number."""
        n = self._l
        negative = n.less(words, self._int(0))
        low = n.select(negative, n.sub(words, self._int(INT32_MIN)), words)
        return low, n.select(negative, self._int(1), self._int(0))

    def _interleave(self, parts: list[T], count: int) -> T:
        n, width = self._l, count // len(parts)
        return n.reshape(n.concat([n.reshape(part, (0, width, 1)) for part in parts], axis=2), (0, count))

    def _int(self, value: int, rank: int = 2) -> T:
        return self._l.constant(torch.full((1,) * rank, value, dtype=torch.int32), "int32")


def _table(dtype: torch.dtype) -> torch.Tensor:
    """[65536] fp32: the number that each pattern of 16 bits stands for in fp16 or bf16."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    return bits.to(torch.int16).view(dtype).float().nan_to_num(0.0, 0.0, 0.0)
