"""Ids and lengths of a plan against the arenas, on the host and before anything is launched.

A kernel that follows an id outside its arena reads somebody else's memory or ends the device context, and with it every
conversation; the tables come from our own manager, so what is refused here is a bug or a damaged arena, caught early.
Ids of -1 are places that kernels skip.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass

import torch

from runtime.config import EngineLimits, ModelSpec
from runtime.errors import TableError
from runtime.kv_storage import KvStorage
from runtime.step import BlockTable, KvView
from runtime.step_tables import StepRows, int32_tensor

REMEMBERED_TABLES = 4096
_REPORT = "nothing was launched; report this with the log"


@dataclass(frozen=True)
class TableBounds:
    """What the ids of one engine may be."""

    vocab_size: int
    max_positions: int
    num_kv_rows: int
    num_pages: int
    page_tokens: int
    block_entries: int

    @classmethod
    def of(cls, spec: ModelSpec, limits: EngineLimits, num_pages: int) -> TableBounds:
        return cls(
            spec.vocab_size, spec.max_positions, spec.num_kv_rows, num_pages, limits.page_tokens, limits.block_entries
        )


class TableChecks:
    """Checks every plan of one engine; a block table is looked through once, since its version never comes again."""

    def __init__(self, bounds: TableBounds, storage: KvStorage) -> None:
        self._bounds, self._storage = bounds, storage
        self._sound: OrderedDict[int, None] = OrderedDict()  # versions of tables

    def rows(self, rows: StepRows) -> None:
        """Raises TableError naming the first table that is wrong."""
        bounds = self._bounds
        if not len(rows.slots) == len(rows.token_ids) == len(rows.record):
            raise TableError(
                f"step: got {len(rows.token_ids)} tokens, {len(rows.slots)} slots and {len(rows.record)} record marks, "
                f"expected as many of each; {_REPORT}"
            )
        _in_range("token_ids", array("q", rows.token_ids), 0, bounds.vocab_size)
        last = rows.first_position + len(rows.token_ids)
        if rows.first_position < 0 or last > bounds.max_positions:
            raise TableError(
                f"positions: got [{rows.first_position}, {last}), expected them in [0, {bounds.max_positions}); "
                f"{_REPORT}"
            )
        self.slots("slots", rows.slots)
        self.view(rows.view)

    def slots(self, name: str, slots: array[int]) -> None:
        """Places of tokens in pages."""
        _in_range(name, slots, -1, self._bounds.num_pages * self._bounds.page_tokens)

    def view(self, view: KvView) -> None:
        """What rows may read."""
        if len(view.page_ids) != len(view.page_lens):
            raise TableError(
                f"page_lens: got {len(view.page_lens)}, expected one for each of {len(view.page_ids)} pages; {_REPORT}"
            )
        _in_range("page_ids", view.page_ids, -1, self._bounds.num_pages)
        _in_range("page_lens", view.page_lens, 0, self._bounds.page_tokens + 1)
        self.blocks(view.blocks)

    def blocks(self, table: BlockTable) -> None:
        """The committed blocks of one conversation."""
        if table.version in self._sound:
            self._sound.move_to_end(table.version)
            return
        starts, rows = table.starts, self._bounds.num_kv_rows
        if (
            len(starts) != rows + 1
            or starts[0] != 0
            or starts[-1] != len(table.ids)
            or len(table.ids) != len(table.lens)
        ):
            raise TableError(
                f"block table: got {len(starts)} starts up to {starts[-1] if starts else 'nothing'} over "
                f"{len(table.ids)} ids and {len(table.lens)} lengths, expected {rows + 1} starts from 0 to the number "
                f"of ids; {_REPORT}"
            )
        if bool((int32_tensor(starts).diff() < 0).any()):
            raise TableError(f"block table: the starts go down, expected them in order; {_REPORT}")
        _in_range("block ids", table.ids, -1, self._storage.num_blocks(table.format))
        _in_range("block lens", table.lens, 0, self._bounds.block_entries + 1)
        self._sound[table.version] = None
        if len(self._sound) > REMEMBERED_TABLES:
            self._sound.popitem(last=False)


def _in_range(name: str, values: array[int], low: int, end: int) -> None:
    """Raises TableError unless all lie in [low, end)."""
    if not values:
        return
    kind = torch.int32 if values.typecode == "i" else torch.int64
    smallest, largest = (int(x) for x in torch.frombuffer(values, dtype=kind).aminmax())
    if smallest < low or largest >= end:
        wrong = smallest if smallest < low else largest
        raise TableError(f"{name}: got {wrong}, expected ids in [{low}, {end}); {_REPORT}")


def check_aligned(name: str, address: int, alignment_bytes: int = 16) -> None:
    """Raises TableError for a pointer that a bulk copy cannot take."""
    if address % alignment_bytes:
        raise TableError(
            f"{name}: got address {address:#x}, expected a multiple of {alignment_bytes} bytes as bulk copies need; "
            f"allocate the arena whole, not as a slice"
        )
