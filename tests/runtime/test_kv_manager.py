"""Reserve and settle: a failed reserve changes nothing, blocks dissolve where that saves some, memory adds up."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engine import LIMITS, SPEC, eager

from runtime.commit_planner import blocks_to_dissolve
from runtime.errors import ConfigError, OutOfMemoryError
from runtime.kv_manager import KvManager
from runtime.lifecycle import Event, State
from runtime.policy.registry import ALL_POLICIES
from runtime.step import LineResult, int32

POLICY = eager(ALL_POLICIES["quantize-int4"])
PAGE = LIMITS.page_tokens


def manager_of(num_pages: int = 100) -> KvManager:
    probe = KvManager(SPEC, LIMITS, 1 << 20)
    return KvManager(SPEC, LIMITS, probe.budget.headroom_bytes + num_pages * probe.page_layout.page_bytes)


def fill(manager: KvManager, handle: int, num_tokens: int) -> None:
    manager.settle_rows(manager.reserve_rows(handle, num_tokens))


def commit(manager: KvManager, handle: int, keep: int) -> None:
    """Stages all it may and keeps `keep` staged tokens in every row, and every old entry."""
    manager.stage(handle, Event.TURN_ENDED)
    plan = manager.plan_commit(handle)
    assert plan is not None
    line = LineResult(0.0, int32([keep] * SPEC.num_kv_rows), int32(plan.blocks.lens))
    manager.settle_commit(manager.reserve_publish(plan, line))


def snapshot(manager: KvManager, handle: int) -> tuple[object, ...]:
    kv = manager[handle]
    pages = [(page.page_id, tuple(page.positions), page.state) for page in kv.pages]
    return pages, tuple(kv.blocks.ids), kv.num_tokens, manager.budget.used_bytes


def test_failed_reserve_changes_nothing() -> None:
    manager = manager_of(10)
    manager.open(0, POLICY)
    fill(manager, 0, 45)
    before = snapshot(manager, 0)
    for reserve in (manager.reserve_rows, manager.reserve_scratch):
        with pytest.raises(OutOfMemoryError):
            reserve(0, 10 * PAGE)
        assert snapshot(manager, 0) == before
    manager.check_invariants()


def test_cancelled_reservation_changes_nothing() -> None:
    manager = manager_of()
    manager.open(0, POLICY)
    fill(manager, 0, 13)
    before = snapshot(manager, 0)
    manager.cancel_rows(manager.reserve_rows(0, 40))
    manager.settle_rows(manager.reserve_scratch(0, 40))
    assert snapshot(manager, 0) == before
    manager.check_invariants()


def test_slots_follow_the_tail_page() -> None:
    manager = manager_of()
    manager.open(0, POLICY)
    fill(manager, 0, 5)
    reservation = manager.reserve_rows(0, 6)
    first = reservation.view.page_ids[0] * PAGE
    second = reservation.view.page_ids[1] * PAGE
    assert list(reservation.slots) == [first + 5, first + 6, first + 7, second, second + 1, second + 2]
    assert list(reservation.view.page_lens) == [8, 3]


def test_a_commit_that_finds_no_room_changes_nothing_and_can_be_done_later() -> None:
    manager = manager_of(20)
    wasteful = dataclasses.replace(POLICY, block_format="kv")
    manager.open(0, wasteful)
    manager.open(1, POLICY)
    fill(manager, 0, 80)
    fill(manager, 1, 80)
    manager.stage(0, Event.TURN_ENDED)
    plan = manager.plan_commit(0)
    assert plan is not None
    line = LineResult(0.0, int32([len(plan.staged_slots)] * SPEC.num_kv_rows), int32())
    before = snapshot(manager, 0)
    with pytest.raises(OutOfMemoryError):
        manager.reserve_publish(plan, line)
    assert snapshot(manager, 0) == before
    manager.release(1)
    manager.settle_commit(manager.reserve_publish(plan, line))
    manager.check_invariants()
    assert manager[0].num_staged == 0 and manager[0].ledger[State.COMMITTED] > 0


def test_nothing_is_staged_below_min_tokens_and_the_recent_window_stays() -> None:
    manager = manager_of()
    manager.open(0, POLICY)
    fill(manager, 0, POLICY.schedule.min_tokens - 1)
    assert manager.stage(0, Event.TURN_ENDED) == 0
    fill(manager, 0, 41)
    assert manager.stage(0, Event.TURN_ENDED) > 0
    oldest_recent = 80 - POLICY.schedule.recent_tokens
    for page in manager[0].pages:
        if page.state is State.STAGED:
            assert max(page.positions) < oldest_recent
    assert min(manager[0].pages[0].positions) == 0


def test_commit_keeps_protected_tokens_whole_and_frees_the_rest() -> None:
    manager = manager_of()
    manager.open(0, POLICY)
    manager[0].protect(20, 23)
    fill(manager, 0, 100)
    used = manager.budget.used_bytes
    commit(manager, 0, keep=3)
    manager.check_invariants()
    assert manager.budget.used_bytes < used
    in_pages = {p for page in manager[0].pages for p in page.positions}
    assert {0, 1, 2, 3, 20, 21, 22} <= in_pages and 24 not in in_pages
    # The next commit puts its protected tokens beside them, in the page that was begun.
    manager[0].protect(150, 152)
    fill(manager, 0, 100)
    compacted = [page.page_id for page in manager[0].pages if page.compacted]
    commit(manager, 0, keep=3)
    manager.check_invariants()
    assert [page.page_id for page in manager[0].pages if page.compacted][: len(compacted)] == compacted
    assert {150, 151} <= {p for page in manager[0].pages for p in page.positions}


def test_truncate_undoes_active_tokens_only() -> None:
    manager = manager_of()
    manager.open(0, POLICY)
    fill(manager, 0, 30)
    before = snapshot(manager, 0)
    fill(manager, 0, 50)
    assert manager.truncate(0, 30) is not None
    assert snapshot(manager, 0) == before
    fill(manager, 0, 70)
    commit(manager, 0, keep=5)
    after_commit = snapshot(manager, 0)
    assert manager.truncate(0, 30) is None, "some of these tokens were committed"
    assert snapshot(manager, 0) == after_commit
    manager.check_invariants()


def test_staged_tokens_are_undone_too() -> None:
    manager = manager_of()
    manager.open(0, POLICY)
    manager[0].protect(20, 23)
    fill(manager, 0, 100)
    manager.stage(0, Event.TURN_ENDED)
    staged, used = manager[0].num_staged, manager.budget.used_bytes
    assert staged == 88 - 7 and manager[0].unprobed == [(0, 88)]
    freed = manager.truncate(0, 45)
    assert freed is not None and len(freed.page_ids) == 7
    manager.check_invariants()
    assert manager[0].num_tokens == 45 and manager[0].num_staged == 45 - 7 and manager[0].unprobed == [(0, 45)]
    assert manager.budget.used_bytes < used
    # The page that was cut stays staged; new tokens go to one of their own.
    reservation = manager.reserve_rows(0, 10)
    assert {slot // PAGE for slot in reservation.slots} == set(reservation.new_page_ids)
    manager.settle_rows(reservation)
    manager.check_invariants()
    plan = manager.plan_commit(0)
    assert plan is not None and list(plan.positions) == [*range(4, 20), *range(23, 45)]
    commit(manager, 0, keep=3)
    manager.check_invariants()


def test_a_rollback_that_meets_a_commit_begins_anew_and_forgets_what_was_protected_later() -> None:
    manager = manager_of()
    manager.open(0, POLICY)
    manager[0].protect(10, 12)
    manager[0].protect(70, 75)
    fill(manager, 0, 100)
    commit(manager, 0, keep=5)
    manager.rollback(0, 95)
    assert manager[0].num_tokens == 95, "the recent window is still there"
    manager.rollback(0, 60)
    manager.check_invariants()
    assert manager[0].num_tokens == 0 and manager.budget.used_bytes == 0
    assert manager[0].protected_ranges() == [(0, 4), (10, 12)]
    manager.rollback(0, 2)
    assert manager[0].protected_ranges() == [(0, 4)], "the policy's own first tokens stay protected"


def test_reset_remembers_protection_and_peak() -> None:
    manager = manager_of()
    manager.open(0, POLICY)
    manager[0].protect(10, 12)
    fill(manager, 0, 50)
    peak = manager.stats(0).peak_kv_bytes
    manager.reset(0)
    manager.check_invariants()
    assert manager[0].num_tokens == 0 and manager.budget.used_bytes == 0
    assert manager[0].protected_ranges() == [(0, 4), (10, 12)]
    assert manager.stats(0).peak_kv_bytes == peak


def test_too_little_memory_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(ConfigError, match="at least"):
        KvManager(SPEC, LIMITS, 1000)


@settings(deadline=None)
@given(
    alive=st.lists(st.integers(0, 16), max_size=8),
    new_kept=st.integers(0, 60),
    repack_ratio=st.sampled_from([0.5, 0.75, 1.0]),
)
def test_dissolving_never_costs_blocks(alive: list[int], new_kept: int, repack_ratio: float) -> None:
    gone = blocks_to_dissolve(alive, new_kept, 16, repack_ratio)
    assert all(alive[i] < repack_ratio * 16 for i in gone)
    moved = new_kept + sum(alive[i] for i in gone)
    after = len(alive) - len(gone) + math.ceil(moved / 16)
    assert after <= len(alive) + math.ceil(new_kept / 16)
    if gone:
        assert after < len(alive) + math.ceil(new_kept / 16), "entries are rewritten for nothing"


def test_empty_blocks_always_dissolve() -> None:
    assert blocks_to_dissolve([0, 16, 0], 0, 16, 0.75) == {0, 2}
    assert blocks_to_dissolve([8, 7], 0, 16, 0.75) == {0, 1}
    assert blocks_to_dissolve([8], 10, 16, 0.75) == set()
