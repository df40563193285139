"""Commits that another thread writes: steps of others go on, what concerns the cache waits, nothing is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from simulated_engine import SlowWorker, drain, last_of, make_engine, policies_for_tests, text_of

import runtime.policy.registry as registry
from runtime import commit_worker
from runtime.commit_worker import CommitWorker
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.errors import CommitKVError
from runtime.request import Event, FinishEvent, Request, SamplingParams
from runtime.step import PublishResult
from runtime.wiring import load_engine

CONFIG = RuntimeConfig(kv_memory_bytes=1 << 20, tokens_per_step=24, probe_tokens_per_step=16)
NEVER = 10**9  # looks: only who waits for it sees it written
LONG = "a turn that is long enough to be compressed " * 2


@pytest.fixture(autouse=True)
def small_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, policy in policies_for_tests().items():
        monkeypatch.setitem(registry.ALL_POLICIES, name, policy)


def ask(request_id: str, text: str, conversation_id: str, max_tokens: int = 8) -> Request:
    return Request(request_id, text, SamplingParams(max_tokens=max_tokens), conversation_id)


def run_turns(engine: Engine) -> list[Event]:
    """Steps until no turn is left, whatever else is."""
    events: list[Event] = []
    while engine.has_turns():
        events += engine.step()[0]
    return events


def begin_commit(engine: Engine, name: str = "a") -> None:
    """A turn, and steps until its commit is under way."""
    engine.submit(ask(f"first {name}", LONG, name))
    while not engine._upkeep.is_committing:
        assert engine.step()[1], "nothing was committed"


def test_turns_of_others_run_while_a_commit_is_written() -> None:
    engine, _, manager = make_engine(CONFIG, policy="commitkv", worker=SlowWorker(NEVER))
    begin_commit(engine)
    engine.submit(ask("other", "hello", "b"))
    assert isinstance(last_of(run_turns(engine), "other"), FinishEvent)
    assert engine._upkeep.is_committing and engine.stats().commits == 0 and not engine.stats().idle
    assert engine._upkeep.finish() and not engine._upkeep.finish()
    assert engine.stats().commits == 1
    drain_waiting(engine)
    manager.check_invariants()


def test_a_second_commit_waits_without_holding_up_steps() -> None:
    engine, _, manager = make_engine(CONFIG, policy="quantize-int8", worker=SlowWorker(NEVER))  # commits at turn end
    begin_commit(engine)
    engine.submit(ask("second", LONG, "b"))
    engine.submit(ask("third", "hello", "c", 30))
    events = run_turns(engine)
    assert isinstance(last_of(events, "second"), FinishEvent) and isinstance(last_of(events, "third"), FinishEvent)
    assert engine._upkeep.is_committing and engine.stats().commits == 0
    drain_waiting(engine)
    assert engine.stats().commits == 2
    manager.check_invariants()


def drain_waiting(engine: Engine) -> None:
    while engine.step()[1]:
        engine._upkeep.finish()


def test_it_goes_on_at_a_step_boundary_once_it_is_drawn_and_once_it_is_written() -> None:
    engine, _, manager = make_engine(CONFIG, policy="commitkv", worker=SlowWorker(3))
    begin_commit(engine)
    [commit] = engine._upkeep._open.values()
    for has_room in (False, False, False, True, True, True, True):
        assert engine.step()[1], "an engine with a commit under way is not at rest"
        assert (commit.reservation is not None) == has_room and engine.stats().commits == 0
    engine.step()
    assert engine.stats().commits == 1
    drain(engine)
    manager.check_invariants()
    assert engine.stats().idle


def test_the_next_turn_of_the_conversation_reads_what_was_committed() -> None:
    texts = []
    for worker in (None, SlowWorker(NEVER), SlowWorker(2)):
        engine, _, manager = make_engine(CONFIG, policy="commitkv", worker=worker)
        said = []
        for i in range(6):
            engine.submit(ask(f"r{i}", LONG, "a"))
            said.append(text_of(run_turns(engine), f"r{i}"))
            for _ in range(12):  # some of the idle time that it would need
                engine.step()
        texts.append(said)
        assert engine.stats().commits > 2
        engine._upkeep.finish()
        manager.check_invariants()
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("how", ["end", "cancel", "twin"])
def test_a_conversation_that_goes_takes_its_commit_along(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, executor, manager = make_engine(CONFIG, policy="commitkv", worker=SlowWorker(NEVER))
    begin_commit(engine)
    if how == "twin":
        while all(handle >= 0 for handle in engine._upkeep._open):
            engine._upkeep.finish()
            if not engine.step()[1]:
                engine.submit(ask(f"more {engine.stats().steps}", LONG, "a"))
    if how == "cancel":
        engine.submit(ask("cancelled", LONG, "a", 200))
        engine.cancel("cancelled")
        run_turns(engine)
        engine._upkeep.finish()
    engine.end_conversation("a")
    drain_waiting(engine)
    manager.check_invariants()
    assert manager.budget.used_bytes == 0 and not executor.entries


def test_a_commit_that_fails_gives_its_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, executor, manager = make_engine(CONFIG, policy="commitkv", worker=SlowWorker(0))
    publish = executor.publish

    def broken(_: object) -> PublishResult:
        raise RuntimeError("the disk of the device is gone")

    monkeypatch.setattr(executor, "publish", broken)
    begin_commit(engine)
    engine.step()  # its line is drawn
    with pytest.raises(RuntimeError, match="is gone"):
        engine.step()
    assert engine.abort(RuntimeError()) == [] and not engine._upkeep.is_committing
    manager.check_invariants()
    monkeypatch.setattr(executor, "publish", publish)
    drain(engine)
    assert engine.stats().commits > 0
    manager.check_invariants()


def test_a_turn_is_undone_whole_though_the_commit_it_waits_for_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, executor, manager = make_engine(CONFIG, policy="commitkv", worker=SlowWorker(NEVER))
    publish = executor.publish

    def broken(_: object) -> PublishResult:
        raise RuntimeError("the disk of the device is gone")

    monkeypatch.setattr(executor, "publish", broken)
    begin_commit(engine)
    before = list(engine.conversation("a").tokens)
    engine.submit(ask("cancelled", LONG, "a"))
    engine.cancel("cancelled")
    events, _ = engine.step()
    assert getattr(last_of(events, "cancelled"), "reason", "") == "cancelled"
    assert engine.conversation("a").tokens == before and engine.conversation("a").turn is None
    with pytest.raises(RuntimeError, match="is gone"):
        engine.step()
    manager.check_invariants()
    monkeypatch.setattr(executor, "publish", publish)
    drain_waiting(engine)
    assert engine.stats().commits > 0


def test_whoever_lacks_memory_waits_for_a_commit_before_caches_are_dropped() -> None:
    pages = 30
    _, _, probe = make_engine(CONFIG)
    total = probe.budget.headroom_bytes + pages * probe.page_layout.page_bytes
    config = dataclasses.replace(CONFIG, kv_memory_bytes=total)
    engine, _, manager = make_engine(config, policy="commitkv", worker=SlowWorker(NEVER))
    begin_commit(engine)
    room = (pages - 2) * manager.page_tokens - manager.budget.used_bytes // probe.page_layout.page_bytes * 8
    engine.submit(ask("big", "b" * (room + 40), "b", 1))
    assert isinstance(last_of(run_turns(engine), "big"), FinishEvent)
    assert engine.stats().commits >= 1
    assert engine.stats().evictions["memory"] == 0
    assert manager[engine.conversation("a").handle].num_tokens > 0


def test_a_worker_writes_on_a_thread_that_gives_way_and_tells() -> None:
    worker, told, seen = CommitWorker(), threading.Event(), []

    def publish() -> PublishResult:
        seen.append((threading.current_thread().name, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
        return PublishResult(3, 4)

    task = worker.run(publish, told.set)
    assert told.wait(30) and task.done()
    assert task.result() == PublishResult(3, 4) and worker.cpu_ns > 0
    [(name, niceness)] = seen
    assert name.startswith("commitkv-commit") and niceness == commit_worker.NICENESS
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < niceness, "nobody else gives way"

    def fails() -> PublishResult:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        worker.run(fails, told.set).result()
    worker.close()


def test_whoever_needs_what_the_worker_has_not_begun_does_it_himself() -> None:
    worker, go_on, begun = CommitWorker(), threading.Event(), threading.Event()
    order: list[str] = []

    def long() -> None:
        begun.set()
        assert go_on.wait(30)

    def short() -> str:
        order.append(threading.current_thread().name)
        return "done"

    first, second = worker.run(long, lambda: None), worker.run(short, lambda: None)
    assert begun.wait(30) and not first.done() and not second.done()
    assert second.result() == "done" == second.result() and second.done()
    go_on.set()
    assert first.result() is None
    worker.close()
    assert order == [threading.current_thread().name], "once, and here"


def test_the_time_of_the_worker_counts_once() -> None:
    worker = SlowWorker(2)
    engine, _, _ = make_engine(CONFIG, policy="commitkv", worker=worker, clock_ns=lambda: 0)
    begin_commit(engine)
    drain(engine)
    worker.cpu_ns = 5_000_000
    assert engine._upkeep.finish() is False
    engine.step()
    assert engine.stats().commits == 1 and engine.stats().commit_time_ms == 5.0


@pytest.mark.parametrize("seed", range(3))
def test_whatever_comes_in_between_nothing_is_lost(seed: int) -> None:
    """A real thread; turns, cancels, ends and demands for memory at any moment. The executor checks what is read."""
    draw, worker = random.Random(seed), CommitWorker()
    config = dataclasses.replace(CONFIG, kv_memory_bytes=1 << 19)
    engine, executor, manager = make_engine(config, policy="commitkv", worker=worker)  # type: ignore[arg-type]
    names = "abcdef"

    def turn(name: str) -> None:
        with contextlib.suppress(CommitKVError):  # it runs a turn, or is too long by now
            policy = draw.choice(("commitkv", "snapkv", "quantize-int8"))
            held = engine._table.find("", name)
            request = ask(
                f"t{draw.random()}", "ab cd"[draw.randrange(5)] * draw.randint(1, 90), name, draw.randint(0, 6)
            )
            engine.submit(dataclasses.replace(request, policy=None if held else policy))

    def undo(name: str) -> None:
        conversation = engine._table.find("", name)
        if conversation is not None and conversation.turn is not None:
            engine.cancel(conversation.turn.request.request_id)

    def end(name: str) -> None:
        with contextlib.suppress(CommitKVError):
            engine.end_conversation(name)

    for _ in range(250):
        action = draw.choices((turn, undo, end), (12, 2, 1))[0]
        action(draw.choice(names))
        if draw.random() < 0.05:
            engine._keeper.make_room()
        for _ in range(draw.choice((1, 3, 20))):
            engine.step()
            if not engine._upkeep.is_committing:
                manager.check_invariants()
    assert engine.stats().commits > 20
    for name in names:
        end(name)
    drain(engine)
    engine.close(1.0)
    assert manager.budget.used_bytes == 0 and not executor.entries


def hold(engine: Engine, tell: Callable[[int], str]) -> list[tuple[str, int]]:
    """Texts and bytes of three turns with idle time behind them."""
    found = []
    for i in range(3):
        engine.submit(ask(f"r{i}", tell(i), "c", 12))
        events = drain(engine)
        found.append((text_of(events, f"r{i}"), engine.kv_stats("c").kv_bytes))
    return found


def test_a_real_engine_says_the_same_whoever_writes(tiny_engine_dir: Path) -> None:
    found = []
    for aside in (False, True):
        config = RuntimeConfig(kv_memory_bytes=16 << 20, num_threads=2, background_commits=aside)
        engine = load_engine(tiny_engine_dir, config, verify=False)
        assert (engine._upkeep._worker is not None) == aside
        found.append(hold(engine, lambda i: f"turn {i}: " + "some words about it, " * 8))
        assert engine.stats().commits > 0 and engine.stats().commit_time_ms > 0
        engine.close(1.0)
    assert found[0] == found[1]
