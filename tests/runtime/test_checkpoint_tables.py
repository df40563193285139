"""Tables of a conversation: what a manager gives, it takes back with other ids; what does not add up is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from simulated_engine import LIMITS, SPEC, eager

from runtime.checkpoint import KvImage, KvPart, KvTables, PageTable
from runtime.checkpoint_tables import check_kv, reinstate, tables_of
from runtime.errors import OutOfMemoryError
from runtime.kv_manager import KvManager
from runtime.lifecycle import Event, State
from runtime.policy.registry import ALL_POLICIES
from runtime.step import LineResult, int32

POLICY = eager(ALL_POLICIES["commitkv"])


def make_manager(kv_memory_bytes: int = 1 << 20) -> KvManager:
    return KvManager(SPEC, LIMITS, kv_memory_bytes)


def grow(manager: KvManager, handle: int, num_tokens: int) -> None:
    reservation = manager.reserve_rows(handle, num_tokens)
    manager.settle_rows(reservation)


def committed(manager: KvManager, handle: int = 0, num_exact: int = 0) -> KvTables:
    """A conversation with active, staged and compacted pages, full and part-filled blocks, and entries gone."""
    manager.open(handle, POLICY)
    manager[handle].protect(20, 23)
    grow(manager, handle, 90)
    manager.stage(handle, Event.TURN_ENDED)
    plan = manager.plan_commit(handle)
    assert plan is not None
    kept = len(plan.staged_slots) // 2
    line = LineResult(0.0, int32([kept] * SPEC.num_kv_rows), int32(), num_exact=num_exact)
    manager.settle_commit(manager.reserve_publish(plan, line))
    grow(manager, handle, 37)
    manager.stage(handle, Event.TURN_ENDED)
    manager.check_invariants()
    return tables_of(manager[handle])


def image_of(tables: KvTables, manager: KvManager) -> KvImage:
    num_pages, num_blocks = len(tables.pages), len(tables.block_lens)
    layout = manager.block_layouts[tables.block_format]
    return KvImage(
        bytes(num_pages * SPEC.num_layers * manager.page_layout.layer_bytes),
        bytes(num_pages * SPEC.num_kv_rows * manager.page_tokens * 2),
        bytes(num_blocks * layout.block_bytes),
        bytes(num_blocks * manager.block_entries * 2),
    )


@pytest.mark.parametrize("num_exact", [0, 11])
def test_tables_come_back_with_other_ids(num_exact: int) -> None:
    first, second = make_manager(), make_manager()
    tables = committed(first, num_exact=num_exact)
    states = {"active", "staged"} | ({"committed"} if num_exact else set())
    assert {page.state for page in tables.pages} == states and any(p.compacted for p in tables.pages)
    assert tables.counts["gone"] > 0 and len(tables.block_lens) >= SPEC.num_kv_rows
    committed(second, 5)  # takes the ids that the first one had
    second.open(9, POLICY)
    place = reinstate(second, 9, tables)
    second.check_invariants()
    assert tables_of(second[9]) == tables
    assert not set(place.page_ids) & {page.page_id for page in second[5].pages}
    assert not set(place.blocks.ids) & set(second[5].blocks.ids)
    grow(second, 9, 10)
    second.check_invariants()
    second.release(9)
    second.release(5)
    assert second.budget.used_bytes == 0


def test_without_room_nothing_changes() -> None:
    tables = committed(make_manager())
    second = make_manager(kv_memory_bytes=60_000)
    second.open(1, POLICY)
    with pytest.raises(OutOfMemoryError):
        for _ in range(1000):
            grow(second, 1, 8)
    second.open(0, POLICY)
    used = second.budget.used_bytes
    with pytest.raises(OutOfMemoryError):
        reinstate(second, 0, tables)
    assert second.budget.used_bytes == used and second[0].num_tokens == 0
    second.check_invariants()


def test_what_a_manager_wrote_it_takes() -> None:
    manager = make_manager()
    tables = committed(manager)
    assert check_kv(KvPart(tables, image_of(tables, manager)), manager, tables.num_tokens + 1) == ""


def _more(counts: dict[str, int], state: State, number: int) -> dict[str, int]:
    return {**counts, state.value: counts[state.value] + number}


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda t: {"block_format": "int2"}, "format 'int2'"),
        (lambda t: {"block_starts": (0, *t.block_starts)}, "rows of blocks instead of"),
        (lambda t: {"block_starts": (*t.block_starts[:-1], 10**6)}, "out of order"),
        (lambda t: {"block_lens": (10**6, *t.block_lens[1:])}, "too many entries"),
        (lambda t: {"block_lens": (0, *t.block_lens[1:])}, "too many entries or none"),
        (lambda t: {"pages": (PageTable(tuple(range(99)), "active", False), *t.pages[1:])}, "too full"),
        (lambda t: {"pages": (dataclasses.replace(t.pages[0], state="asleep"), *t.pages[1:])}, "unknown state"),
        (lambda t: {"pages": t.pages[1:]}, "neither page nor block"),
        (lambda t: {"num_tokens": t.num_tokens + 5}, "cached tokens of"),
        (lambda t: {"committed_tokens": t.committed_tokens - 1}, "neither page nor block"),
        (lambda t: {"counts": _more(t.counts, State.ACTIVE, 1)}, "counts that are not"),
        (lambda t: {"counts": _more(t.counts, State.GONE, -(10**6))}, "negative counts"),
        (lambda t: {"counts": {**t.counts, "asleep": 0}}, "unknown states"),
    ],
)
def test_tables_that_do_not_add_up_are_told(change: Any, part: str) -> None:
    manager = make_manager()
    tables = committed(manager)
    bad = dataclasses.replace(tables, **change(tables))
    assert part in check_kv(KvPart(bad, image_of(tables, manager)), manager, tables.num_tokens + 1)


def test_bytes_of_another_size_are_told() -> None:
    manager = make_manager()
    tables = committed(manager)
    image = dataclasses.replace(image_of(tables, manager), seen=b"")
    assert "parts of" in check_kv(KvPart(tables, image), manager, tables.num_tokens + 1)
