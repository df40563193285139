"""Entries that stay unquantized in pages: what the manager counts, what the model reads, what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from simulated_engine import LIMITS, SPEC, eager

from runtime.commit_planner import make_line_plan
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.errors import ConfigError
from runtime.kv_manager import KvManager
from runtime.kv_totals import kv_totals
from runtime.lifecycle import Event, State
from runtime.memory_plan import peak_memory
from runtime.policy import registry
from runtime.policy.base import Policy, Protection
from runtime.policy.registry import ALL_POLICIES
from runtime.request import FinishEvent, Request, SamplingParams, TextEvent
from runtime.step import FADE, LineResult, int32
from runtime.wiring import load_engine

PAGE, ROWS = LIMITS.page_tokens, SPEC.num_kv_rows
POLICY = eager(ALL_POLICIES["commitkv"], exact_entries=PAGE + 3)


def commit(manager: KvManager, kept: int, exact: int, lost: int = 0) -> int:
    """Stages all it may; every row keeps `kept` tokens in blocks and `exact` in pages. Returns the staged tokens."""
    manager.stage(0, Event.TURN_ENDED)
    plan = manager.plan_commit(0)
    assert plan is not None and plan.rules.exact_entries == POLICY.exact_entries
    assert list(plan.positions[: plan.num_exact]) == [-1] * plan.num_exact == [-1] * manager[0].num_exact
    line = LineResult(0.0, int32([kept] * ROWS), int32(plan.blocks.lens), num_exact=exact, exact_lost=lost)
    manager.settle_commit(manager.reserve_publish(plan, line))
    manager.check_invariants()
    return len(plan.staged_slots) - plan.num_exact


def test_they_are_committed_and_chosen_anew_by_every_commit() -> None:
    manager = KvManager(SPEC, LIMITS, 1 << 20)
    manager.open(0, POLICY)
    manager.settle_rows(manager.reserve_rows(0, 70))
    staged = commit(manager, kept=9, exact=PAGE + 3)
    kv = manager[0]
    assert [page.num_tokens for page in kv.exact_pages()] == [PAGE, 3] and kv.num_exact == PAGE + 3
    assert kv.ledger[State.COMMITTED] == (9 + PAGE + 3) * ROWS and kv.committed_tokens == staged
    first = [page.page_id for page in kv.exact_pages()]
    manager.settle_rows(manager.reserve_rows(0, 40))
    staged += commit(manager, kept=8, exact=PAGE + 3, lost=5)
    assert kv.committed_tokens == staged and kv.ledger[State.COMMITTED] == (9 + 8 + PAGE + 3) * ROWS
    assert not set(first) & {page.page_id for page in kv.exact_pages()}, "the old pages are free"
    totals = kv_totals(manager, [0])
    assert totals.committed_bytes >= 2 * manager.page_layout.page_bytes
    assert totals.used_bytes == manager.budget.used_bytes
    assert manager.truncate(0, kv.num_tokens - 3) is not None and kv.num_exact == PAGE + 3
    manager.check_invariants()
    assert manager.truncate(0, 20) is None, "some of them were committed"
    manager.release(0)
    assert manager.budget.used_bytes == 0


def test_none_are_left_where_a_later_policy_wants_none() -> None:
    manager = KvManager(SPEC, LIMITS, 1 << 20)
    manager.open(0, POLICY)
    manager.settle_rows(manager.reserve_rows(0, 70))
    commit(manager, kept=2, exact=4)
    manager.settle_rows(manager.reserve_rows(0, 30))
    commit(manager, kept=6, exact=0, lost=3 * ROWS)
    assert manager[0].num_exact == 0 and not list(manager[0].exact_pages())


def test_memory_plans_count_their_pages() -> None:
    plain, exact = (
        peak_memory(SPEC, LIMITS, dataclasses.replace(POLICY, exact_entries=count), 500, 100) for count in (0, 17)
    )
    assert exact - plain == 3 * KvManager(SPEC, LIMITS, 1 << 20).page_layout.page_bytes


def hold(engine: Engine, policy: str, num_turns: int = 5) -> list[str]:
    answers = []
    for turn in range(num_turns):
        text = f"Turn {turn}: " + f"the quick brown fox {turn} jumps over {turn} dogs. " * (turn % 2)
        engine.submit(Request(str(turn), text, SamplingParams(max_tokens=12), "c", policy=policy))
        busy, answer = True, ""
        while busy:
            events, busy = engine.step()
            for event in events:
                assert isinstance(event, TextEvent | FinishEvent), event
                answer += event.text if isinstance(event, TextEvent) else ""
        answers.append(answer)
    return answers


def use(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Policy:
    base = ALL_POLICIES["commitkv"]
    schedule = dataclasses.replace(base.schedule, min_tokens=50, renew=False)
    policy = dataclasses.replace(base, name="exact", schedule=schedule, **changes)
    monkeypatch.setitem(registry.ALL_POLICIES, "exact", policy)
    return policy


def start(engine_dir: Path) -> Engine:
    return load_engine(engine_dir, RuntimeConfig(kv_memory_bytes=64 << 20, num_threads=1), verify=False)


@pytest.fixture
def engine(tiny_engine_dir: Path) -> Engine:
    return start(tiny_engine_dir)


def test_when_all_are_exact_the_answers_are_those_of_the_full_cache(
    engine: Engine, tiny_engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two in a hundred entries of four bits would not do: the same policy without exact entries answers otherwise."""
    use(monkeypatch, exact_entries=256, block_format="int4", budget_ratio=0.02, floor_entries=0)
    answers = hold(engine, "exact")
    kv = engine._manager[engine.conversation("c").handle]
    assert kv.num_exact > 100 and kv.num_commits >= 2
    assert answers == hold(start(tiny_engine_dir), "full")
    use(monkeypatch, exact_entries=0, block_format="int4", budget_ratio=0.02, floor_entries=0)
    assert answers != hold(start(tiny_engine_dir), "exact")


def test_re_reading_everything_fades_their_scores_too(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, exact_entries=8)
    hold(engine, "exact")
    kv = engine._manager[engine.conversation("c").handle]
    storage: Any = engine._executor.storage  # type: ignore[attr-defined]
    pages = [page.page_id for page in kv.exact_pages()]
    before = [seen[pages].clone() for seen in storage.seen]
    kv.begin_reread(kv.num_tokens - 32)
    work = engine._maintenance._next_reread(engine.conversation("c"))
    assert work is not None and list(work.plan.exact_pages) == pages and work.plan.fades
    engine._executor._fade(work.plan)  # type: ignore[attr-defined]
    for seen, was in zip(storage.seen, before, strict=True):
        assert (seen[pages].float() - was.float() * FADE).abs().max() < 1e-3 and was.any()


@pytest.mark.parametrize(
    "changes",
    [
        {"exact_entries": -1},
        {"exact_entries": 257},
        {"score": "recency"},
        {"smooth": 3},
        {"protection": Protection(outlier_z=4.0)},
        {"alternate": ALL_POLICIES["commitkv"]},
    ],
    ids=str,
)
def test_contradictions_are_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="exact_entries of commitkv: got"):
        dataclasses.replace(ALL_POLICIES["commitkv"], **{"exact_entries": 8, **changes})


def test_the_budget_is_one_of_all_old_tokens_whether_exact_or_not() -> None:
    manager = KvManager(SPEC, LIMITS, 1 << 20)
    manager.open(0, dataclasses.replace(POLICY, budget_ratio=0.5, score="seen"))
    manager.settle_rows(manager.reserve_rows(0, 70))
    staged = commit(manager, kept=3, exact=PAGE + 3)
    manager.settle_rows(manager.reserve_rows(0, 30))
    manager.stage(0, Event.TURN_ENDED)
    plan = make_line_plan(0, manager[0], SPEC.num_layers)
    new = len(plan.staged_slots) - plan.num_exact
    assert plan.keep_entries == round(0.5 * (staged + new) * ROWS)
