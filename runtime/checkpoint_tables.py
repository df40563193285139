"""The manager's half of a checkpoint: one conversation's tables without ids, and the same tables with new ids."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from plugins.layout import SCORE_BYTES
from runtime.checkpoint import KvPart, KvTables, PageTable
from runtime.kv_manager import KvManager
from runtime.kv_state import ConversationKv, Page, make_block_table
from runtime.lifecycle import Event, Ledger, State
from runtime.step import BlockTable, int32


@dataclass(frozen=True, eq=False)
class KvPlace:
    """Where one conversation lies in the arenas.   page_lens: tokens filled per page."""

    page_ids: array[int]
    page_lens: array[int]
    blocks: BlockTable


def place_of(kv: ConversationKv) -> KvPlace:
    """Where a conversation lies that runs no turn."""
    page_ids = int32(page.page_id for page in kv.pages)
    return KvPlace(page_ids, int32(page.num_tokens for page in kv.pages), kv.blocks)


def tables_of(kv: ConversationKv) -> KvTables:
    """What the manager knows of a conversation that runs no turn."""
    return KvTables(
        pages=tuple(PageTable(tuple(page.positions), page.state.value, page.compacted) for page in kv.pages),
        block_format=kv.blocks.format,
        block_starts=tuple(kv.blocks.starts),
        block_lens=tuple(kv.blocks.lens),
        counts={state.value: kv.ledger[state] for state in State},
        num_tokens=kv.num_tokens,
        committed_tokens=kv.committed_tokens,
        num_commits=kv.num_commits,
        peak_bytes=kv.peak_bytes,
        unprobed=tuple(kv.unprobed),
        whole=kv.whole,
        reread=tuple(kv.reread),
        reread_at=kv.reread_at,
    )


def check_kv(kv: KvPart, manager: KvManager, num_known: int) -> str:
    """Why a cache does not fit the manager, "" if it does.   num_known: tokens of the conversation's text."""
    return _check_tables(kv.tables, manager, num_known) or _check_image(kv, manager)


def _check_image(kv: KvPart, manager: KvManager) -> str:
    num_pages, num_blocks = len(kv.tables.pages), len(kv.tables.block_lens)
    spec, block = manager.spec, manager.block_layouts[kv.tables.block_format]
    expected = (
        num_pages * spec.num_layers * manager.page_layout.layer_bytes,
        num_pages * spec.num_kv_rows * manager.page_tokens * SCORE_BYTES,
        num_blocks * block.block_bytes,
        num_blocks * manager.block_entries * SCORE_BYTES,
    )
    got = tuple(map(len, (kv.image.pages, kv.image.seen, kv.image.blocks, kv.image.score)))
    return "" if got == expected else f"parts of {got} bytes instead of {expected}"


def _check_tables(tables: KvTables, manager: KvManager, num_known: int) -> str:
    rows = manager.spec.num_kv_rows
    starts, lens = tables.block_starts, tables.block_lens
    exact = sum(len(page.positions) for page in tables.pages if page.state == State.COMMITTED.value)
    in_pages = sum(len(page.positions) for page in tables.pages) - exact
    living = sum(count for state, count in tables.counts.items() if state != State.GONE.value)
    ordered = all(first <= last for first, last in pairwise(starts))
    checks = (
        (tables.block_format in manager.block_layouts, f"blocks of format {tables.block_format!r}"),
        (len(starts) == rows + 1 and starts[0] == 0, f"{len(starts) - 1} rows of blocks instead of {rows}"),
        (ordered and starts[-1:] == (len(lens),), "rows of blocks out of order"),
        (all(0 < length <= manager.block_entries for length in lens), "blocks with too many entries or none"),
        (all(0 < len(page.positions) <= manager.page_tokens for page in tables.pages), "pages too full or empty"),
        (set(tables.counts) == {state.value for state in State}, "unknown states"),
        (min(tables.counts.values(), default=0) >= 0, "negative counts"),
        (0 <= tables.num_tokens <= num_known, f"{tables.num_tokens} cached tokens of {num_known} known"),
        (in_pages + tables.committed_tokens == tables.num_tokens, "tokens in neither page nor block"),
        (living == (in_pages + exact) * rows + sum(lens), "counts that are not those of its pages and blocks"),
        (all(page.state in ("active", "staged", "committed") for page in tables.pages), "pages in an unknown state"),
    )
    return next((reason for good, reason in checks if not good), "")


def reinstate(manager: KvManager, handle: int, tables: KvTables) -> KvPlace:
    """Gives an empty conversation these tables with ids of its own, whose bytes are then to be filled.

    Raises OutOfMemoryError, with nothing changed, where there is no room.
    """
    kv = manager[handle]
    assert kv.blocks.format == tables.block_format, "another policy"
    assert kv.num_tokens == 0 and not kv.pages, "only an empty conversation takes tables"
    page_ids, block_ids = manager.take_room(handle, len(tables.pages), len(tables.block_lens))
    kv.set_pages(
        [
            Page(page_id, int32(page.positions), State(page.state), page.compacted)
            for page_id, page in zip(page_ids, tables.pages, strict=True)
        ]
    )
    kv.blocks = make_block_table(tables.block_format, _rows(tables, block_ids))
    kv.num_tokens = tables.num_tokens
    kv.committed_tokens, kv.num_commits = tables.committed_tokens, tables.num_commits
    kv.peak_bytes = tables.peak_bytes
    kv.unprobed, kv.whole = list(tables.unprobed), tables.whole
    kv.reread, kv.reread_at = list(tables.reread), tables.reread_at
    _fill_ledger(kv.ledger, {State(state): count for state, count in tables.counts.items()})
    return place_of(kv)


def _rows(tables: KvTables, block_ids: Iterable[int]) -> list[list[tuple[int, int]]]:
    blocks = list(zip(block_ids, tables.block_lens, strict=True))
    return [blocks[first:last] for first, last in pairwise(tables.block_starts)]


def _fill_ledger(ledger: Ledger, counts: dict[State, int]) -> None:
    """Brings an empty ledger to `counts` along legal transitions."""
    total = sum(counts.values())
    ledger.arrive(total)
    ledger.move(State.ACTIVE, Event.TURN_ENDED, total - counts[State.ACTIVE])
    ledger.move(State.STAGED, Event.BELOW, counts[State.GONE])
    ledger.move(State.STAGED, Event.KEPT, counts[State.COMMITTED] + counts[State.EVICTABLE])
    ledger.move(State.COMMITTED, Event.FELL, counts[State.EVICTABLE])
