"""Plans as flat tables: what the operations of one step read, built from the conversations' own tables."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from plugins.attend.params import RECORD_SUM, LayerBlocks, StepTables
from runtime.config import ModelSpec
from runtime.step import NO_WATCH, BlockTable, KvView, SequencePlan, Watch, int32

SEEN_LAST_ROWS = 64
SEEN_EVERY = 8
CACHED_TABLES = 64


@dataclass(frozen=True, eq=False)
class StepRows:
    """Rows of one conversation.   record: [num_tokens] marks of rows, see `plugins.attend.params`.

    record_skip, watch, handle: as in the plan; handle -1 for rows that are no conversation's.
    """

    token_ids: Sequence[int]
    first_position: int
    slots: array[int]
    view: KvView
    record: bytes
    record_skip: int
    watch: Watch = NO_WATCH
    handle: int = -1

    @classmethod
    def of(cls, sequence: SequencePlan) -> StepRows:
        """A decode row records if asked to; a chunk does with its last rows and every `SEEN_EVERY`-th position, unless
        the plan says which."""
        count, first = len(sequence.token_ids), sequence.first_position
        if not sequence.record_seen:
            record = bytes(count)
        elif sequence.record_sum:
            record = bytes([RECORD_SUM]) * count
        elif sequence.record_last:
            record = bytes(i >= count - sequence.record_last for i in range(count))
        elif count <= SEEN_LAST_ROWS:
            record = b"\x01" * count
        else:
            record = bytes(i >= count - SEEN_LAST_ROWS or (first + i) % SEEN_EVERY == 0 for i in range(count))
        return cls(
            sequence.token_ids, first, sequence.slots, sequence.view, record, sequence.record_skip,
            sequence.watch, sequence.handle,
        )  # fmt: skip


class TableBuilder:
    """Tables of steps of one model; keeps the block lists of recent groups, which change at commits only."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._blocks: OrderedDict[tuple[int, ...], LayerBlocks] = OrderedDict()

    def build(self, sequences: Sequence[StepRows]) -> StepTables:
        """Tables of consecutive sequences whose blocks lie in one arena."""
        row_starts, page_starts, page_ids, page_lens = int32([0]), int32([0]), int32(), int32()
        record, record_skip = bytearray(), int32()
        for rows in sequences:
            row_starts.append(row_starts[-1] + len(rows.token_ids))
            page_starts.append(page_starts[-1] + len(rows.view.page_ids))
            page_ids.extend(rows.view.page_ids)
            page_lens.extend(rows.view.page_lens)
            record += rows.record
            record_skip.append(rows.record_skip)
        return StepTables(
            int32_tensor(row_starts),
            int32_tensor(page_starts),
            int32_tensor(page_ids),
            int32_tensor(page_lens),
            torch.frombuffer(record, dtype=torch.uint8),
            int32_tensor(record_skip),
            self._blocks_of(tuple(rows.view.blocks for rows in sequences)),
        )

    def _blocks_of(self, tables: tuple[BlockTable, ...]) -> LayerBlocks:
        key = tuple(table.version for table in tables)
        cached = self._blocks.get(key)
        if cached is None:
            cached = self._blocks[key] = layer_blocks(tables, self._spec)
            if len(self._blocks) > CACHED_TABLES:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(key)
        return cached


def layer_blocks(tables: tuple[BlockTable, ...], spec: ModelSpec) -> LayerBlocks:
    """The lists of several conversations, one layer after the other."""
    layers, heads = spec.num_layers, spec.num_kv_heads
    starts = [int32_tensor(table.starts) for table in tables]
    counts = torch.stack([s.diff().view(layers, heads) for s in starts], dim=1).view(layers, -1)
    layer_starts = torch.zeros((layers, counts.shape[1] + 1), dtype=torch.int32)
    torch.cumsum(counts, dim=1, out=layer_starts[:, 1:])
    first = (0, *layer_starts[:, -1].cumsum(dim=0).tolist()[:-1])
    ids, lens = ([int32_tensor(a) for a in arrays] for arrays in zip(*((t.ids, t.lens) for t in tables), strict=True))
    if len(tables) > 1:  # lists of one conversation are in this order already
        parts = list(_layer_parts(starts, layers, heads))
        ids, lens = ([torch.cat([x[i][part] for i, part in parts])] for x in (ids, lens))
    return LayerBlocks(layer_starts, ids[0], lens[0], first)


def _layer_parts(starts: list[torch.Tensor], layers: int, heads: int) -> Iterator[tuple[int, slice]]:
    """(conversation, its blocks of the layer), layer by layer."""
    bounds = [s[::heads].tolist() for s in starts]
    for layer in range(layers):
        for i, bound in enumerate(bounds):
            yield i, slice(bound[layer], bound[layer + 1])


def int32_tensor(values: array[int]) -> torch.Tensor:
    """Shares the array's memory; tables are frozen and buffers of a step are its own."""
    return torch.frombuffer(values, dtype=torch.int32) if values else torch.zeros(0, dtype=torch.int32)


def int64_tensor(values: array[int]) -> torch.Tensor:
    """A copy."""
    return int32_tensor(values).long()
