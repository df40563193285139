"""Tile lists of a step as one table of words [num_layers, X] int32: what the TensorRT plugins read as `tiles`.

    section, for each kernel in turn          words
    block_tiles                               num_ranges + 1
    tiles                                     max_tiles * len(TILE_FIELDS)
    rows (score alone)                        R
Sections and their parts begin at multiples of 16 bytes. Where they begin follows from the numbers of rows R and of
sequences S and from the device, never from what the lists hold, so that a captured graph replays with new lists. A
step with as many rows as sequences is a decode step: it has the first section only. Words behind the last one are
ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from plugins.attend.cuda import CHUNK_ROWS, DECODE_ROWS, AttendKernel
from plugins.attend.params import StepTables
from plugins.attend.tiles import RowTable, TileLists, TilePlan, recorded_rows, split_rows
from plugins.kv_tiles import TILE_FIELDS, KvShape
from plugins.score.cuda import ScoreKernel

ALIGNMENT_WORDS = 4
MAX_MULTIPROCESSORS = 192
"""No card that kernels are compiled for has more (RTX PRO 6000: 188, H100: 132). Bounds what an engine reserves."""


@dataclass(frozen=True)
class Section:
    """Word offsets of one kernel's lists in a layer's row, and how many tiles there is room for."""

    block_tiles: int
    tiles: int
    rows: int
    max_tiles: int


@dataclass(frozen=True)
class TileLayout:
    """words: of one layer."""

    sections: tuple[Section, ...]
    words: int


@dataclass(frozen=True)
class StepKernels:
    """attend for decode rows and for chunks, and score for the chunks' recorded rows."""

    decode: AttendKernel
    chunk: AttendKernel
    score: ScoreKernel

    @classmethod
    def of(cls, shape: KvShape, sm: str) -> StepKernels:
        return cls(AttendKernel(shape, DECODE_ROWS, sm), AttendKernel(shape, CHUNK_ROWS, sm), ScoreKernel(shape, sm))

    @property
    def all(self) -> tuple[AttendKernel | ScoreKernel, ...]:
        return self.decode, self.chunk, self.score


class TileWords:
    """Lays out and packs the lists of some kernels for a device."""

    def __init__(self, kernels: Sequence[AttendKernel | ScoreKernel], kv_heads: int, num_multiprocessors: int) -> None:
        self._kernels, self._kv_heads = tuple(kernels), kv_heads
        self._num_multiprocessors = num_multiprocessors
        self._lists = TileLists()

    def layout(self, num_sequences: int, num_rows: int, decodes: bool) -> TileLayout:
        """decodes: one row of every sequence, so that only the first kernel has work."""
        sections, at = [], 0
        for kernel in self._kernels[: 1 if decodes else None]:
            max_tiles = self._max_tiles(kernel, num_sequences, num_rows)
            tiles = at + _aligned(kernel.num_ranges(self._num_multiprocessors) + 1)
            rows = tiles + _aligned(max_tiles * len(TILE_FIELDS))
            sections.append(Section(at, tiles, rows, max_tiles))
            at = rows + (_aligned(num_rows) if isinstance(kernel, ScoreKernel) else 0)
        return TileLayout(tuple(sections), at)

    def _max_tiles(self, kernel: AttendKernel | ScoreKernel, num_sequences: int, num_rows: int) -> int:
        """A tile begins where a group or a range does. Groups: rows of one sequence and head that fit a tile."""
        if kernel.query_rows == DECODE_ROWS:
            groups = num_sequences
        else:
            groups = num_rows // (kernel.query_rows // kernel.shape.group) + num_sequences
        return groups * self._kv_heads + kernel.num_ranges(self._num_multiprocessors)

    def pack(self, tables: StepTables, row_tables: Sequence[RowTable]) -> torch.Tensor:
        """Lists of all layers from host tables. row_tables: of each kernel."""
        num_sequences, num_rows = tables.row_starts.shape[0] - 1, tables.record.shape[0]
        decodes = num_rows == num_sequences
        layout = self.layout(num_sequences, num_rows, decodes)
        words = torch.zeros((tables.blocks.starts.shape[0], layout.words), dtype=torch.int32)
        for index, (kernel, rows) in enumerate(zip(self._kernels, row_tables, strict=True)):
            num_ranges = kernel.num_ranges(self._num_multiprocessors)
            plan = TilePlan(kernel.shape, self._kv_heads, kernel.query_rows, num_ranges)
            found = self._lists.build(tables, rows, plan)
            if index >= len(layout.sections):
                assert found.tiles.shape[1] == 0, "as many rows as sequences, yet a sequence of several rows"
                continue
            section = layout.sections[index]
            assert found.tiles.shape[1] <= section.max_tiles
            flat = found.tiles.flatten(1)
            words[:, section.block_tiles : section.block_tiles + num_ranges + 1] = found.block_tiles
            words[:, section.tiles : section.tiles + flat.shape[1]] = flat
            if rows.rows is not None:
                words[:, section.rows : section.rows + rows.rows.shape[0]] = rows.rows
        return words


def pack_step(tables: StepTables, kernels: StepKernels, kv_heads: int, num_multiprocessors: int) -> torch.Tensor:
    """`tiles` of the attend plugin [num_layers, X] int32, on the host."""
    words = TileWords(kernels.all, kv_heads, num_multiprocessors)
    return words.pack(tables, split_rows(tables, kernels.decode.shape.group))


def pack_score(tables: StepTables, kernel: ScoreKernel, kv_heads: int, num_multiprocessors: int) -> torch.Tensor:
    """`tiles` of the score plugin [num_layers, X] int32, on the host."""
    return TileWords((kernel,), kv_heads, num_multiprocessors).pack(tables, (recorded_rows(tables),))


def most_step_words(kernels: StepKernels, kv_heads: int, num_sequences: int, num_rows: int) -> int:
    """What `pack_step` takes at most on any card, for an engine of these limits."""
    words = TileWords(kernels.all, kv_heads, MAX_MULTIPROCESSORS)
    return words.layout(num_sequences, num_rows, decodes=False).words


def _aligned(words: int) -> int:
    return -(-words // ALIGNMENT_WORDS) * ALIGNMENT_WORDS
