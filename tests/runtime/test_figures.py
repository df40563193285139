"""What the engine counts, against an engine over the simulated executor."""

from __future__ import annotations

import pytest
from simulated_engine import drain, make_engine, policies_for_tests

import runtime.policy.registry as registry
from runtime.config import RuntimeConfig
from runtime.figures import Figures
from runtime.kv_totals import kv_totals
from runtime.request import Request, SamplingParams

CONFIG = RuntimeConfig(kv_memory_bytes=1 << 20, tokens_per_step=24, probe_tokens_per_step=16)


@pytest.fixture(autouse=True)
def small_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, policy in policies_for_tests().items():
        monkeypatch.setitem(registry.ALL_POLICIES, name, policy)


def talk(engine: object, num_turns: int, max_tokens: int = 12) -> None:
    for i in range(num_turns):
        text = f"turn number {i} says something of its own"
        engine.submit(Request(f"r{i}", text, SamplingParams(max_tokens=max_tokens), "c"))  # type: ignore[attr-defined]
        drain(engine)  # type: ignore[arg-type]


def test_bytes_by_state_add_up_to_what_the_budget_says() -> None:
    engine, _, manager = make_engine(CONFIG, policy="commitkv")
    talk(engine, 8)
    stats = engine.stats()
    kv = stats.kv
    held = kv.active_bytes + kv.staged_bytes + kv.committed_bytes + kv.evictable_bytes
    assert kv.scratch_bytes == 0 and held == kv.used_bytes == manager.budget.used_bytes
    assert held + kv.table_bytes == stats.total_kv_bytes
    assert kv.committed_bytes > 0 and kv.active_bytes > 0
    one = engine.kv_stats("c")
    assert (kv.active_tokens, kv.staged_tokens) == (one.active, one.staged)
    assert abs(kv.committed_tokens + kv.evictable_tokens - one.committed) <= 1


def test_a_full_cache_is_active_pages_only() -> None:
    engine, _, manager = make_engine(CONFIG, policy="full")
    talk(engine, 2)
    kv = engine.stats().kv
    assert kv.active_bytes == kv.used_bytes == len(manager[0].pages) * kv.page_bytes
    assert (kv.staged_bytes, kv.committed_bytes, kv.evictable_bytes) == (0, 0, 0)
    assert kv.active_tokens == manager[0].num_tokens


def test_what_two_conversations_share_is_counted_once() -> None:
    _, _, manager = make_engine(CONFIG, policy="full")
    prefix = tuple(range(20))  # two pages of 8, and four tokens that each has for itself
    for handle in (0, 1):
        manager.open(handle, registry.ALL_POLICIES["full"])
        manager.announce_prefix(handle, "", prefix)
        adopted = manager.adopt_prefix(handle)
        manager.settle_rows(manager.reserve_rows(handle, len(prefix) - adopted))
    kv = kv_totals(manager, (0, 1))
    assert kv.used_bytes == kv.active_bytes == 4 * kv.page_bytes and kv.scratch_bytes == 0
    assert kv.saved_bytes == 2 * kv.page_bytes


def test_pages_of_a_running_probe_are_scratch() -> None:
    engine, _, manager = make_engine(CONFIG, policy="full")
    talk(engine, 1)
    reservation = manager.reserve_scratch(0, 20)
    assert engine.stats().kv.scratch_bytes == len(reservation.new_page_ids) * engine.stats().kv.page_bytes > 0
    manager.cancel_rows(reservation)
    assert engine.stats().kv.scratch_bytes == 0


def test_turns_that_read_and_turns_that_write_are_told_apart() -> None:
    engine, _, _ = make_engine(CONFIG)
    engine.submit(Request("short", "hi", SamplingParams(max_tokens=50)))
    for _ in range(3):
        engine.step()
    engine.submit(Request("long", "x" * 100, SamplingParams(max_tokens=5)))
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.context, stats.waiting, stats.max_running) == (2, 1, 0, 4)
    assert stats.context_tokens == 100 - (CONFIG.tokens_per_step - 1)
    drain(engine)
    assert engine.stats().context_tokens == 0


def test_figures_begin_again_after_they_were_cleared() -> None:
    engine, _, _ = make_engine(CONFIG, policy="commitkv")
    talk(engine, 6)
    before = engine.stats()
    assert before.steps > 0 and before.commits > 0 and before.execute_time_ms > 0
    engine.clear_figures()
    after = engine.stats()
    assert (after.steps, after.tokens, after.commits, after.execute_time_ms) == (0, 0, 0, 0.0)
    assert after.total_kv_bytes == before.total_kv_bytes


def test_evictions_are_counted_by_reason() -> None:
    figures = Figures()
    figures.count_eviction("idle")
    figures.count_eviction("idle")
    figures.count_eviction("memory")
    assert {reason: n for reason, n in figures.evictions.items() if n} == {"idle": 2, "memory": 1}
    figures.clear()
    assert not any(figures.evictions.values()) and "idle" in figures.evictions
