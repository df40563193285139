"""System prompts are stored once per tenant: pages, bytes, and who may look at them."""

from __future__ import annotations

import dataclasses

import pytest
from simulated_engine import LIMITS, SPEC, drain, eager, last_of, make_engine, policies_for_tests, text_of

import runtime.policy.registry as registry
from runtime.config import RuntimeConfig
from runtime.kv_manager import KvManager
from runtime.lifecycle import Event
from runtime.policy.base import Protection
from runtime.policy.registry import ALL_POLICIES
from runtime.request import FinishEvent, Request, SamplingParams
from runtime.step import LineResult, int32

FULL, SMALL = ALL_POLICIES["full"], eager(ALL_POLICIES["quantize-int4"])
PAGE = LIMITS.page_tokens
PREFIX = list(range(10, 10 + 3 * PAGE + 5))  # three whole pages and a rest
CONFIG = RuntimeConfig(kv_memory_bytes=1 << 20, tokens_per_step=24, probe_tokens_per_step=16)


@pytest.fixture
def manager() -> KvManager:
    return KvManager(SPEC, LIMITS, 1 << 20)


def begin(manager: KvManager, handle: int, tenant: str = "x", policy: object = FULL, prefix: list[int] = PREFIX) -> int:
    """Opens a conversation with a protected prefix; tokens that it need not compute."""
    manager.open(handle, policy)  # type: ignore[arg-type]
    manager[handle].protect(0, len(prefix))
    manager.announce_prefix(handle, tenant, prefix)
    return manager.adopt_prefix(handle)


def fill(manager: KvManager, handle: int, num_tokens: int) -> list[int]:
    """Pages that turned out to be held already."""
    spare = manager.settle_rows(manager.reserve_rows(handle, num_tokens)).page_ids
    manager.check_invariants()
    return list(spare)


def pages_of(manager: KvManager, handle: int) -> list[int]:
    return [page.page_id for page in manager[handle].pages]


def test_whole_pages_are_taken_over_and_the_rest_is_private(manager: KvManager) -> None:
    assert begin(manager, 0) == 0
    fill(manager, 0, 2 * PAGE + 3)
    assert begin(manager, 1, policy=SMALL) == 2 * PAGE, "only what has been computed can be taken over"
    fill(manager, 0, PAGE)
    assert manager.adopt_prefix(1) == PAGE
    fill(manager, 1, 20)
    assert pages_of(manager, 1)[:3] == pages_of(manager, 0)[:3]
    assert not set(pages_of(manager, 1)[3:]) & set(pages_of(manager, 0))
    assert manager[1].num_tokens == 3 * PAGE + 20
    # Tokens from the first private page on are written where nobody else reads.
    slots = set(manager.reserve_rows(1, 30).slots)
    assert not {slot // PAGE for slot in slots} & set(pages_of(manager, 0))


def test_bytes_count_once_for_whoever_has_held_them_longest(manager: KvManager) -> None:
    begin(manager, 0)
    fill(manager, 0, 40)
    begin(manager, 1)
    fill(manager, 1, 10)
    page_bytes = manager.page_layout.page_bytes
    tables = [manager[handle].table_bytes for handle in (0, 1)]
    assert [manager.kv_bytes(h) - t for h, t in zip((0, 1), tables, strict=True)] == [5 * page_bytes, 2 * page_bytes]
    assert manager.budget.used_bytes == 7 * page_bytes
    assert manager.stats(0).shared_kv_bytes == manager.stats(1).shared_kv_bytes == 3 * page_bytes
    freed = manager.release(0)
    assert len(freed.page_ids) == 2, "what another one reads stays"
    manager.check_invariants()
    assert manager.kv_bytes(1) - tables[1] == manager.budget.used_bytes == 5 * page_bytes
    assert manager.stats(1).peak_kv_bytes >= manager.kv_bytes(1)
    assert len(manager.release(1).page_ids) == 5
    manager.check_invariants()
    assert manager.budget.used_bytes == 0 and not manager.shared.page_ids


def test_computed_twice_at_once_it_is_stored_once(manager: KvManager) -> None:
    assert begin(manager, 0) == begin(manager, 1) == 0
    first, second = manager.reserve_rows(0, 30), manager.reserve_rows(1, 30)
    assert not manager.settle_rows(first).page_ids
    assert list(manager.settle_rows(second).page_ids) == list(second.new_page_ids)[:3]
    manager.check_invariants()
    assert pages_of(manager, 0)[:3] == pages_of(manager, 1)[:3]


def test_tenants_and_other_beginnings_share_nothing(manager: KvManager) -> None:
    begin(manager, 0)
    fill(manager, 0, 40)
    assert begin(manager, 1, tenant="y") == 0
    changed = [*PREFIX[:PAGE], 5, *PREFIX[PAGE + 1 :]]
    assert begin(manager, 2, prefix=changed) == PAGE, "the page before the change is the same"
    assert begin(manager, 3, prefix=[5, *PREFIX[1:]]) == 0
    assert begin(manager, 4, prefix=PREFIX[: PAGE - 1]) == 0
    for handle in (1, 2, 3):
        fill(manager, handle, 40)
    assert manager.budget.used_bytes == sum(
        manager.kv_bytes(handle) - manager[handle].table_bytes for handle in range(5)
    )
    assert not set(pages_of(manager, 1)) & set(pages_of(manager, 0))


def test_what_may_be_staged_is_not_shared(manager: KvManager) -> None:
    loose = dataclasses.replace(SMALL, protection=Protection(system_prompt=False))
    for handle in (0, 1):
        manager.open(handle, loose)
        manager.announce_prefix(handle, "x", PREFIX)
        assert manager.adopt_prefix(handle) == 0
        fill(manager, handle, 60)
    assert not manager.shared.page_ids


def test_commits_leave_shared_pages_where_they_are(manager: KvManager) -> None:
    begin(manager, 0)
    fill(manager, 0, 40)
    begin(manager, 1, policy=SMALL)
    fill(manager, 1, 120)
    shared = pages_of(manager, 0)[:3]
    manager.stage(1, Event.TURN_ENDED)
    plan = manager.plan_commit(1)
    assert plan is not None and min(plan.positions) >= len(PREFIX)
    assert not {slot // PAGE for slot in plan.staged_slots} & set(shared)
    line = LineResult(0.0, int32([5] * SPEC.num_kv_rows), int32(plan.blocks.lens))
    freed = manager.settle_commit(manager.reserve_publish(plan, line))
    assert not set(freed.page_ids) & set(shared)
    manager.check_invariants()
    assert set(shared) <= set(pages_of(manager, 1))


def test_a_cut_inside_a_shared_page_gives_up_all_of_it(manager: KvManager) -> None:
    begin(manager, 0)
    fill(manager, 0, 40)
    begin(manager, 1)
    fill(manager, 1, 10)
    before = pages_of(manager, 0)
    manager.rollback(1, 2 * PAGE + 3)
    manager.check_invariants()
    assert manager[1].num_tokens == 2 * PAGE, "nobody may write into what is left of the page"
    assert pages_of(manager, 0) == before
    # What follows is another text: nobody may find it under the old one.
    fill(manager, 1, 3 * PAGE)
    assert begin(manager, 2) == 3 * PAGE
    assert pages_of(manager, 2) == before[:3]


def test_a_dropped_cache_finds_its_prefix_again(manager: KvManager) -> None:
    begin(manager, 0)
    fill(manager, 0, 40)
    begin(manager, 1)
    fill(manager, 1, 10)
    assert len(manager.reset(1).page_ids) == 2
    manager.check_invariants()
    assert manager.shared.num_waiting(1, manager[1]) == 3 * PAGE
    assert manager.adopt_prefix(1) == 3 * PAGE and manager[1].num_tokens == 3 * PAGE


# In an engine


def ask(name: str, system: str, tenant: str = "", policy: str = "full", text: str = "hello") -> Request:
    return Request(f"r{name}{tenant}", text, SamplingParams(max_tokens=9), name, system, policy=policy, tenant=tenant)


def test_a_chat_that_lost_its_prompt_while_its_cache_was_gone_takes_nothing_over(manager: KvManager) -> None:
    """Found by random chats: the edit found nothing to undo, and the old prompt came back from others' pages."""
    begin(manager, 0)
    fill(manager, 0, 3 * PAGE)
    assert begin(manager, 1) == 3 * PAGE
    manager.reset(1)
    manager.rollback(1, 0)
    manager.announce_prefix(1, "x", [])
    assert manager.adopt_prefix(1) == 0
    assert manager.shared.prefix(1) == ("", [])


def test_an_edit_behind_a_lost_cache_forgets_what_was_announced_there(manager: KvManager) -> None:
    begin(manager, 0)
    fill(manager, 0, 3 * PAGE)
    assert begin(manager, 1) == 3 * PAGE
    manager.reset(1)
    manager.rollback(1, PAGE + 3)
    assert manager.adopt_prefix(1) == PAGE, "up to the page that the edit begins in"


@pytest.mark.parametrize("batch", [5, 24, 200])
def test_many_conversations_hold_one_prompt_and_say_the_same(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, policy in policies_for_tests().items():
        monkeypatch.setitem(registry.ALL_POLICIES, name, policy)
    system = "be kind and brief " * 5
    config = dataclasses.replace(CONFIG, tokens_per_step=batch)
    alone, _, _ = make_engine(config)
    alone.submit(ask("a", system))
    expected = text_of(drain(alone), "ra")
    engine, _, manager = make_engine(config)
    names = "abcdefgh"
    for i, name in enumerate(names):
        engine.submit(ask(name, system, policy=("full", "quantize-int8")[i % 2]))
    events = drain(engine)
    manager.check_invariants()
    whole = (len(system) + 2) // PAGE
    reused = 0
    for name in names:
        end = last_of(events, f"r{name}")
        assert isinstance(end, FinishEvent) and text_of(events, f"r{name}") == expected
        reused += end.stats.reused_tokens
        assert end.stats.recomputed_tokens == 0
        assert end.stats.reused_tokens + end.stats.missed_blocks * PAGE >= end.stats.prompt_tokens
    # Four begin at once and may compute it beside each other; whoever comes later does not.
    assert reused >= 4 * whole * PAGE
    kv = [manager.kv_bytes(c.handle) - manager[c.handle].table_bytes for c in engine._table]
    assert sum(kv) == manager.budget.used_bytes
    assert (
        manager.budget.used_bytes == (whole + 8 * (len(pages_of(manager, 0)) - whole)) * manager.page_layout.page_bytes
    )
    for name in names:
        engine.end_conversation(name)
    drain(engine)
    assert manager.budget.used_bytes == 0


def test_admission_counts_a_shared_prompt_once() -> None:
    system = "s" * (30 * PAGE)
    probe = make_engine(CONFIG)[2]
    total = probe.budget.headroom_bytes + 50 * probe.page_layout.page_bytes
    engine, _, _ = make_engine(dataclasses.replace(CONFIG, kv_memory_bytes=total))
    engine.submit(ask("a", system))
    drain(engine)
    for name in "bcd":
        engine.submit(ask(name, system))
    engine.step()
    assert engine.stats().running == 3, "they fit beside each other: 30 pages together and a few each"
    drain(engine)


def test_tenants_do_not_see_each_other_in_reuse() -> None:
    engine, _, manager = make_engine(CONFIG)
    for tenant in ("x", "y"):
        engine.submit(ask("a", "be kind " * 10, tenant))
        end = last_of(drain(engine), f"ra{tenant}")
        assert isinstance(end, FinishEvent) and end.stats.reused_tokens == 0
    assert not set(pages_of(manager, 0)) & set(pages_of(manager, 1))
