"""The tables of one step in the shapes that a TensorRT engine takes (`runtime.engine_interface`), on the host.

Sizes are rounded up to powers of two, so that few shapes occur and a decode step can replay a captured graph: a batch
gets sequences that pad, ragged tables get ids of -1. Everything is checked before anything is uploaded.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from plugins.attend.params import RECORD_SUM, LayerBlocks, StepTables
from runtime.config import ModelSpec
from runtime.engine_interface import EngineInterface
from runtime.errors import ConfigError
from runtime.step import BlockTable, KvView, int32
from runtime.step_tables import StepRows, TableBuilder, int32_tensor

TileLists = Callable[[StepTables], torch.Tensor]
"""Host tables of one step -> tile lists of all layers [L, X] int32."""

BLOCK_TABLES = ("block_starts", "block_ids", "block_lens")
_PADDING_VERSION = 0


@dataclass(frozen=True, eq=False)
class PackedStep:
    """step: tables that change with every step, by input name.   blocks: those that change at commits only.

    sizes: what the letters of the interface stand for.   decodes: one row of every sequence.   num_logits: rows of
    `logits` that were asked for; those behind them pad.
    """

    step: Mapping[str, torch.Tensor]
    blocks: Mapping[str, torch.Tensor]
    sizes: Mapping[str, int]
    decodes: bool
    num_logits: int


class StepPacker:
    """Packs the steps of one engine."""

    def __init__(self, spec: ModelSpec, interface: EngineInterface, block_format: str, tiles: TileLists) -> None:
        self._spec, self._interface, self._format, self._tiles = spec, interface, block_format, tiles
        self._tables = TableBuilder(spec)
        empty = BlockTable(_PADDING_VERSION, block_format, int32([0] * (spec.num_kv_rows + 1)), int32(), int32())
        self._padding = StepRows((0,), 0, int32([-1]), KvView(int32(), int32(), empty), b"\0", 0)
        self._blocks: tuple[LayerBlocks, Mapping[str, torch.Tensor]] | None = None

    def pack(self, sequences: Sequence[StepRows], logit_rows: array[int]) -> PackedStep:
        """Raises ConfigError where the step is larger than the engine was built for, or has blocks of another kind."""
        self._check_format(sequences)
        decodes = all(len(rows.token_ids) == 1 for rows in sequences)
        wanted = len(sequences)
        if decodes:
            sequences = [*sequences, *[self._padding] * (self._bucket("S", wanted) - wanted)]
        tables = self._tables.build(sequences)
        # Rows that pad have no place, and their logits are dropped.
        asked = int32_tensor(logit_rows)
        num_logits = self._bucket("N", max(1, asked.shape[0]))
        step = {
            "token_ids": int32_tensor(int32(t for rows in sequences for t in rows.token_ids)),
            "positions": int32_tensor(int32(p for rows in sequences for p in _positions(rows))),
            "slots": int32_tensor(int32(s for rows in sequences for s in rows.slots)),
            "logit_rows": F.pad(asked, (0, num_logits - asked.shape[0])),
            "row_starts": tables.row_starts,
            "page_starts": tables.page_starts,
            "page_ids": self._pad("P", tables.page_ids, -1),
            "page_lens": self._pad("P", tables.page_lens, 0),
            "record": tables.record.bool(),  # whether squares are added up is said by the tiles
            "record_skip": tables.record_skip,
        }
        step["tiles"] = self._pad("X", self._tiles(tables), 0)
        blocks = self._block_tables(tables.blocks)
        sizes = self._sizes(step, blocks)
        return PackedStep(step, blocks, sizes, decodes, asked.shape[0])

    def _check_format(self, sequences: Sequence[StepRows]) -> None:
        for rows in sequences:
            blocks = rows.view.blocks
            if blocks.num_blocks and blocks.format != self._format:
                raise ConfigError(
                    f"block format: got a conversation with {blocks.format} blocks, expected {self._format}, which the "
                    f"engine was built for; use a policy of that format or build another engine with --policy"
                )
            if RECORD_SUM in rows.record:
                raise ConfigError(
                    "score: got a policy that adds attention weights up (h2o), expected one that compares them or adds "
                    "their squares up, which is what this engine's plugin records; choose another policy, or run it "
                    "on a torch engine"
                )

    def _bucket(self, name: str, size: int) -> int:
        """The next power of two, or the largest that the engine takes."""
        dim = self._interface.dim(name)
        if size > dim.most:
            raise ConfigError(
                f"step: needs {size:,} for {name}, expected at most {dim.most:,}, which the engine was built for; "
                f"lower tokens_per_step, or build it with larger limits"
            )
        return min(dim.most, max(dim.least, 1 << max(0, size - 1).bit_length()))

    def _pad(self, name: str, table: torch.Tensor, value: int) -> torch.Tensor:
        """Grows the last dimension to a bucket of size `name`."""
        return F.pad(table, (0, self._bucket(name, table.shape[-1]) - table.shape[-1]), value=value)

    def _block_tables(self, blocks: LayerBlocks) -> Mapping[str, torch.Tensor]:
        """The same object as long as no conversation of the step commits."""
        if self._blocks is not None and self._blocks[0] is blocks:
            return self._blocks[1]
        counts = blocks.starts[:, -1:]
        size = self._bucket("B", int(counts.max()))
        filled = torch.arange(size) < counts
        ids, lens = torch.full(filled.shape, -1, dtype=torch.int32), torch.zeros(filled.shape, dtype=torch.int32)
        ids[filled], lens[filled] = blocks.ids, blocks.lens
        tables = dict(zip(BLOCK_TABLES, (blocks.starts, ids, lens), strict=True))
        self._blocks = (blocks, tables)
        return tables

    def _sizes(self, step: Mapping[str, torch.Tensor], blocks: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Value of every letter; ConfigError where one is outside the engine's range."""
        sizes: dict[str, int] = {}
        for binding in self._interface.inputs:
            table = step.get(binding.name, blocks.get(binding.name))
            if table is None:
                continue  # an arena
            for size, got in zip(binding.shape, table.shape, strict=True):
                if isinstance(size, str):
                    dim = self._interface.dim(size)
                    if not dim.least <= got <= dim.most:
                        raise ConfigError(
                            f"step: {binding.name} needs {got:,} for {size}, expected {dim.least:,} to {dim.most:,}, "
                            f"which the engine was built for; lower tokens_per_step, or build it with larger limits"
                        )
                    assert sizes.setdefault(size, got) == got, (binding.name, size)
                else:
                    assert got == size, (binding.name, got, size)
        return sizes


def _positions(rows: StepRows) -> range:
    return range(rows.first_position, rows.first_position + len(rows.token_ids))
