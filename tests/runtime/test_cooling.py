"""Signals from the device to the lifecycle: what steps report, and which tokens of a running turn are staged for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from simulated_engine import EAGER, eager, make_engine
from test_executor_torch import GREEDY, Bench, bench, conversation, tokens_of

import runtime.policy.registry as registry
from builder import lower_torch
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.errors import ConfigError, UnsupportedPolicyError
from runtime.kv_manager import KvManager
from runtime.lifecycle import State
from runtime.policy.base import Policy, Schedule
from runtime.policy.recording import watch_of
from runtime.policy.registry import ALL_POLICIES
from runtime.policy.variants import with_changes
from runtime.request import ErrorEvent, Request, SamplingParams
from runtime.step import NO_WATCH, SignalResult, StepPlan, Watch
from runtime.wiring import load_engine

__all__ = ["bench"]  # the fixture: forms in torch and native ones
BOTH = Watch(attention=True, hidden=True)
COMMITKV = ALL_POLICIES["commitkv"]


def run(bench: Bench, tokens: list[int], pieces: list[int], watch: Watch = BOTH) -> list[SignalResult]:
    held, found = conversation(0), []
    for first, last in zip([0, *pieces], [*pieces, len(tokens)], strict=True):
        plan = replace(held.plan(tokens[first:last], GREEDY), watch=watch)
        found += bench.executor.run(StepPlan((plan,))).signals
    return found


def test_steps_that_nobody_watches_report_nothing(bench: Bench) -> None:
    assert run(bench, tokens_of(1, 20), [], NO_WATCH) == []


def test_jumps_are_of_neighbouring_states_however_the_text_is_cut(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[torch.Tensor] = []
    take = lower_torch._TorchOps.take_rows
    monkeypatch.setattr(lower_torch._TorchOps, "take_rows", lambda self, x: states.append(x) or take(self, x))
    tokens = tokens_of(3, 25)
    whole = run(bench, tokens, [])[0].jumps
    expected = [
        1.0 - float(torch.cosine_similarity(a, b, dim=0)) for a, b in zip(states[0][1:], states[0], strict=False)
    ]
    assert whole == pytest.approx(expected, abs=1e-4) and len(whole) == 24
    bench.executor._states._newest.clear()
    pieces = [jump for result in run(bench, tokens, [1, 9, 10, 24]) for jump in result.jumps]
    assert pieces == pytest.approx(expected, abs=1e-3)


def test_a_look_says_where_attention_falls(bench: Bench) -> None:
    results = run(bench, tokens_of(2, 40), [30, 39])
    for result, num_pages in zip(results, (4, 5, 5), strict=True):
        assert len(result.page_shares) == num_pages
        assert sum(result.page_shares.values()) == pytest.approx(1.0, abs=1e-3), "nothing is committed yet"
        assert 0.0 < result.entropy <= 1.0
    assert all(result.handle == 0 for result in results)
    only_hidden = run(bench, tokens_of(2, 40), [], Watch(hidden=True))[0]
    assert only_hidden.page_shares == {} and len(only_hidden.jumps) == 39


def test_watching_does_not_change_answers(bench: Bench) -> None:
    tokens = tokens_of(4, 33)
    answers = []
    for watch in (NO_WATCH, BOTH):
        run(bench, tokens, [20, 32], watch)
        answers.append(bench.spy.logits.clone())
        seen = [s.clone() for s in bench.storage.seen]
        answers += seen
    half = len(answers) // 2
    for plain, watched in zip(answers[:half], answers[half:], strict=True):
        torch.testing.assert_close(plain, watched, atol=0, rtol=0, equal_nan=True)


def test_who_is_watched() -> None:
    assert watch_of(COMMITKV, 0, 100) == NO_WATCH
    assert watch_of(with_changes(COMMITKV, {"signals.boundary": 1}), 0, 100) == NO_WATCH
    attention = with_changes(COMMITKV, {"signals.attention": 1, "signals.every_tokens": 10})
    assert watch_of(attention, 9, 10) == Watch(attention=True) and watch_of(attention, 10, 11) == NO_WATCH
    assert watch_of(with_changes(COMMITKV, {"signals.jump": 1}), 10, 11) == Watch(hidden=True)
    assert watch_of(with_changes(ALL_POLICIES["full"], {"signals.jump": 1}), 10, 11) == NO_WATCH


def simulated(monkeypatch: pytest.MonkeyPatch, **changes: object) -> tuple[Engine, KvManager]:
    policy = with_changes(eager(COMMITKV, score="seen"), {"schedule.at_turn_end": False, **changes})
    monkeypatch.setitem(registry.ALL_POLICIES, "commitkv", policy)
    engine, _, manager = make_engine(RuntimeConfig(kv_memory_bytes=1 << 20), policy="commitkv")
    return engine, manager


def hold(engine: Engine, text: str, max_tokens: int, each: Callable[[], None]) -> None:
    engine.submit(Request("r", text, SamplingParams(max_tokens=max_tokens), "c"))
    while engine.has_turns():
        events, _ = engine.step()
        assert not any(isinstance(event, ErrorEvent) for event in events), events
        each()


@pytest.mark.parametrize(("weight", "staged"), [(0.0, False), (1.0, True)])
def test_a_boundary_stages_and_commits_while_the_turn_runs(
    weight: float, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, manager = simulated(monkeypatch, **{"signals.boundary": weight, "signals.patience": 1})
    engine._maintenance._cooling._boundaries = frozenset({1 + ord(">") % 96})  # closes a user message
    most = {"staged": 0, "commits": 0}

    def look() -> None:
        for kv in manager._conversations.values():
            most["staged"] = max(most["staged"], kv.num_staged)
        most["commits"] = engine.stats().commits if engine.has_turns() else most["commits"]

    hold(engine, "hello " * 20, 60, look)
    assert (most["staged"] > 0) == (most["commits"] > 0) == staged
    manager.check_invariants()


def test_only_pages_behind_the_recent_window_cool(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, manager = simulated(
        monkeypatch, **{"signals.boundary": 1.0, "signals.patience": 1, "schedule.every_steps": 0}
    )
    engine._maintenance._cooling._boundaries = frozenset(range(97))  # every token ends something

    def look() -> None:
        for kv in manager._conversations.values():
            newest = [p for page in kv.staged_pages() for p in page.positions]
            assert not newest or max(newest) < kv.num_tokens - EAGER.recent_tokens
            assert kv.num_tokens >= EAGER.min_tokens or not newest

    hold(engine, "hello " * 20, 30, look)
    kv = next(iter(manager._conversations.values()))
    assert kv.ledger[State.STAGED] > 0, "with no review and no end of turn it waits for idle time"
    assert not any(kv.is_protected(p) for page in kv.staged_pages() for p in kv.loose_positions(page))


@pytest.mark.parametrize("weights", [
    {"signals.attention": 1.0}, {"signals.jump": 1.0, "signals.jump_z": 0.5}, {"signals.boundary": 1.0},
    {"signals.entropy": 1.0, "signals.entropy_rise": 1e-3, "signals.half_life_tokens": 2},
    {"signals.attention": 1.0, "signals.jump": 0.5, "signals.boundary": 0.5, "signals.entropy": 0.1},
], ids=lambda w: "+".join(name.removeprefix("signals.") for name in w if "_" not in name))  # fmt: skip
def test_every_signal_reaches_a_real_engine(
    weights: dict[str, float], tiny_engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = Schedule(min_tokens=64, recent_tokens=32, span_tokens=32, at_turn_end=False, on_idle=False)
    base = replace(COMMITKV, schedule=schedule, floor_entries=2)
    policy = with_changes(base, {"signals.threshold": 0.01, "signals.patience": 1, **weights})
    commits: dict[str, int] = {}
    for name, each in (("off", base), ("on", policy)):
        monkeypatch.setitem(registry.ALL_POLICIES, "commitkv", each)
        engine = load_engine(tiny_engine_dir, RuntimeConfig(kv_memory_bytes=16 << 20, num_threads=1))
        hold(engine, "one two three four five " * 12, 48, lambda: None)
        commits[name] = engine.stats().commits
    assert commits["off"] == 0 and commits["on"] > 0


def test_an_engine_of_plain_tables_refuses_what_it_cannot_report() -> None:
    from test_executor_torch import LIMITS, SPEC

    manager = KvManager(SPEC, LIMITS, 64 << 20, only_format="k8v4")
    manager.open(0, with_changes(COMMITKV, {"signals.boundary": 1.0}))
    for name in ("attention", "entropy", "jump"):
        with pytest.raises(UnsupportedPolicyError, match=rf"commitkv.*{name}"):
            manager.open(1, with_changes(COMMITKV, {f"signals.{name}": 1.0}))
    assert 1 not in manager


def test_a_stand_in_keeps_the_signals() -> None:
    signals = with_changes(COMMITKV, {"signals.boundary": 1.0}).signals
    pooled: Policy = replace(ALL_POLICIES["pyramidkv-pooled"], signals=signals)
    assert pooled.for_task("code").signals == signals
    alternating = replace(ALL_POLICIES["pyramidkv-rkv-alternating"], signals=signals)
    assert alternating.at_commit(1).signals == signals
    with pytest.raises(ConfigError, match=r"signals\.patience"):
        with_changes(pooled, {"signals.patience": 0})
