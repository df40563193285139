"""Commits of several conversations at once: what each writes, who drops out, who waits for whom."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from simulated_engine import SlowWorker, drain, last_of, make_engine, policies_for_tests
from simulated_executor import SimulatedExecutor

import runtime.policy.registry as registry
from runtime import maintenance
from runtime.checkpoint import KvImage, KvTables
from runtime.checkpoint_tables import place_of, tables_of
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.errors import OutOfMemoryError
from runtime.kv_manager import KvManager
from runtime.kv_transfer import KvTransfer
from runtime.paged_executor import PagedExecutor
from runtime.request import FinishEvent, Request, SamplingParams
from runtime.reservations import CommitReservation
from runtime.step import LinePlan, LineResult, PublishPlan, PublishResult
from runtime.wiring import load_engine

CONFIG = RuntimeConfig(kv_memory_bytes=1 << 20, tokens_per_step=400, probe_tokens_per_step=16)
NAMES = ("a", "b", "c", "d")
NEVER = 10**9
Made = tuple[Engine, SimulatedExecutor, KvManager]


@pytest.fixture(autouse=True)
def small_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, policy in policies_for_tests().items():
        monkeypatch.setitem(registry.ALL_POLICIES, name, policy)


def end_turns_together(engine: Engine, length: int = 90, policy: str | None = None) -> None:
    """A turn in each conversation, all of which end in one step."""
    for name in NAMES:
        engine.submit(Request(f"{name}0", name * length, SamplingParams(max_tokens=1), name, policy=policy))
    ended: list[str] = []
    while not ended:
        events, _ = engine.step()
        ended = [event.request_id for event in events if isinstance(event, FinishEvent)]
    assert len(ended) == len(NAMES)


def make(worker: SlowWorker | None = None, policy: str = "snapkv") -> Made:
    engine, executor, manager = make_engine(CONFIG, policy=policy, worker=worker)
    end_turns_together(engine)
    return engine, executor, manager


def under_way(engine: Engine) -> list[str]:
    return [name for name in NAMES if engine._manager.open_commits.concerns(engine.conversation(name).handle)]


def handle_of(engine: Engine, name: str) -> int:
    return engine.conversation(name).handle


def steps_to_rest(engine: Engine) -> int:
    """Step boundaries until every turn is committed."""
    count = 0
    while engine.stats().commits < len(NAMES):
        engine.step()
        count += 1
        assert count < 100
    return count


@pytest.mark.parametrize("looks", [None, 0, 2])
def test_turns_that_end_together_need_fewer_step_boundaries_than_there_are(
    monkeypatch: pytest.MonkeyPatch, looks: int | None
) -> None:
    counts = {}
    for most in (1, maintenance.MOST_COMMITS):
        monkeypatch.setattr(maintenance, "MOST_COMMITS", most)
        engine, _, manager = make(None if looks is None else SlowWorker(looks))
        counts[most] = steps_to_rest(engine)
        manager.check_invariants()
    assert counts[1] >= len(NAMES) and counts[maintenance.MOST_COMMITS] < counts[1] / 2
    assert counts[maintenance.MOST_COMMITS] < len(NAMES) or looks == 2, "then one commit alone takes six"


def test_a_batch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "MOST_COMMITS", 3)
    engine, _, _ = make()
    engine.step()
    assert engine.stats().commits == 3
    engine.step()
    assert engine.stats().commits == 4


def test_a_batch_takes_only_what_memory_has_room_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, manager = make()
    budget, upkeep = manager.budget, engine._maintenance
    plan = manager.plan_commit(handle_of(engine, "a"))
    assert plan is not None
    for fit, expected in ((0.5, 1), (2.5, 2), (3.5, 3)):
        monkeypatch.setattr(budget, "total_bytes", budget.used_bytes + int(fit * upkeep._most_bytes(plan)))
        work = upkeep._commits(upkeep._at_rest())
        assert work is not None and len(work.plans) == expected, "of one alone the manager says whether it fits"


def test_the_watermark_commits_as_many_as_bring_memory_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, manager = make(SlowWorker(NEVER))
    upkeep, used = engine._maintenance, manager.budget.used_bytes
    staged = manager[handle_of(engine, "a")].num_staged / manager.page_tokens * manager.page_layout.page_bytes
    for above, expected in ((-1.0, 1), (0.5, 1), (1.5, 2), (2.5, 3), (9.0, 4)):
        monkeypatch.setattr(upkeep, "_watermark", (used - above * staged) / manager.budget.total_bytes)
        work = upkeep.reclaim()
        assert work is not None and len(work.plans) == expected


def test_idle_conversations_that_are_read_are_committed_together_when_memory_is_short() -> None:
    engine, _, manager = make(SlowWorker(NEVER), policy="commitkv")
    for name in NAMES[:3]:
        manager[handle_of(engine, name)].unprobed.clear()
    work = engine._maintenance.compress()
    assert [plan.handle for plan in work.plans] == [handle_of(engine, name) for name in NAMES[:3]]  # type: ignore[union-attr]


@pytest.mark.parametrize("looks", [None, 0])
def test_one_that_finds_no_room_drops_out_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, looks: int | None
) -> None:
    engine, _, manager = make(None if looks is None else SlowWorker(looks))
    reserve, dropped = manager.reserve_publish, []

    def short(plan: LinePlan, line: LineResult) -> CommitReservation:
        if plan.handle == handle_of(engine, "b") and not dropped:
            dropped.append(plan.handle)
            raise OutOfMemoryError("no room")
        return reserve(plan, line)

    monkeypatch.setattr(manager, "reserve_publish", short)
    while engine.stats().commits < 3:
        engine.step()
    assert dropped and under_way(engine) in ([], ["b"]), "it may have begun anew"
    assert manager[handle_of(engine, "b")].num_staged > 0 and manager[handle_of(engine, "c")].num_staged == 0
    manager.check_invariants()
    drain(engine)
    assert engine.stats().commits == 4, "it is tried again"
    assert engine.stats().evictions["memory"] == 0, "the others' commits gave memory back"
    manager.check_invariants()


@pytest.mark.parametrize("looks", [None, 0])
def test_when_nothing_else_gives_memory_back_somebodys_cache_goes(
    monkeypatch: pytest.MonkeyPatch, looks: int | None
) -> None:
    engine, _, manager = make(None if looks is None else SlowWorker(looks))

    def short(plan: LinePlan, line: LineResult) -> CommitReservation:
        raise OutOfMemoryError("no room")

    monkeypatch.setattr(manager, "reserve_publish", short)
    while not engine.stats().evictions["memory"]:
        assert engine.step()[1]
    assert engine.stats().evictions["memory"] == 1 and engine.stats().commits == 0, "one cache for all of the batch"
    manager.check_invariants()


def breaking(executor: SimulatedExecutor, handles: list[int]) -> Callable[[PublishPlan], PublishResult]:
    """`executor.publish` that fails once for each of `handles`."""
    publish, left = executor.publish, list(handles)

    def broken(plan: PublishPlan) -> PublishResult:
        if plan.line.handle in left:
            left.remove(plan.line.handle)
            raise RuntimeError(f"cannot write {plan.line.handle}")
        return publish(plan)

    return broken


@pytest.mark.parametrize("looks", [None, 0, NEVER])
@pytest.mark.parametrize("names", ["b", "ad", "abcd"])
def test_an_error_while_writing_cancels_that_one_alone(
    monkeypatch: pytest.MonkeyPatch, looks: int | None, names: str
) -> None:
    engine, executor, manager = make(None if looks is None else SlowWorker(looks))
    handles = [handle_of(engine, name) for name in names]
    monkeypatch.setattr(executor, "publish", breaking(executor, handles))
    with pytest.raises((RuntimeError, ExceptionGroup)) as caught:
        for _ in range(10):
            engine.step()
            if looks == NEVER:
                engine._upkeep.finish()
    errors = caught.value.exceptions if isinstance(caught.value, ExceptionGroup) else (caught.value,)
    assert [str(error) for error in errors] == [f"cannot write {handle}" for handle in handles]
    assert engine.stats().commits == len(NAMES) - len(names) and not under_way(engine)
    manager.check_invariants()
    assert engine.abort(RuntimeError()) == []
    if looks == NEVER:
        engine.step()
        engine._upkeep.finish()
    drain(engine)
    assert engine.stats().commits == len(NAMES), "those that failed are tried again"
    manager.check_invariants()


def test_a_line_that_cannot_be_drawn_cancels_that_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, executor, manager = make(SlowWorker(0))
    draw, broken = executor.draw_line, [handle_of(engine, "c")]

    def fails(plan: LinePlan) -> LineResult:
        if plan.handle in broken:
            broken.remove(plan.handle)
            raise ValueError("no line")
        return draw(plan)

    monkeypatch.setattr(executor, "draw_line", fails)
    engine.step()
    with pytest.raises(ValueError, match="no line"):
        engine.step()
    assert under_way(engine) == ["a", "b", "d"]
    drain(engine)
    assert engine.stats().commits == len(NAMES)
    manager.check_invariants()


PHASES = ["drawing", "writing"]


def begin(phase: str, policy: str = "snapkv") -> Made:
    """A batch of four whose lines are being drawn, or whose blocks are being written."""
    engine, executor, manager = make(SlowWorker(NEVER), policy)
    engine.step()
    if phase == "writing":
        engine._upkeep._reserve(list(engine._upkeep._open.values()), engine._upkeep._start)
    assert under_way(engine) == list(NAMES) and engine.stats().commits == 0
    return engine, executor, manager


def settle_rest(engine: Engine, manager: KvManager) -> None:
    while engine.step()[1]:
        engine._upkeep.finish()
    manager.check_invariants()


@pytest.mark.parametrize("phase", PHASES)
def test_a_next_turn_waits_for_its_own_commit_alone(phase: str) -> None:
    engine, _, manager = begin(phase)
    engine.submit(Request("b1", "more", SamplingParams(max_tokens=2), "b"))
    while engine.has_turns():
        engine.step()
    assert engine.stats().commits == 1 and under_way(engine) == ["a", "c", "d"]
    assert manager[handle_of(engine, "b")].num_commits == 1
    settle_rest(engine, manager)
    assert [manager[handle_of(engine, name)].num_commits for name in NAMES] == [1, 2, 1, 1]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["end", "cancel", "rollback", "drop", "checkpoint"])
def test_whoever_goes_or_is_undone_takes_only_its_own_commit_along(how: str, phase: str) -> None:
    engine, _, manager = begin(phase)
    handle = handle_of(engine, "b")
    tokens = list(engine.conversation("b").tokens)
    if how == "end":
        engine.end_conversation("b")
        engine.step()
        assert handle not in manager
    elif how == "cancel":
        engine.submit(Request("b1", "more and more", SamplingParams(max_tokens=9), "b"))
        engine.step()
        engine.cancel("b1")
        engine.step()
        assert engine.conversation("b").tokens == tokens
    elif how == "rollback":
        manager.rollback(handle, 20)
        assert manager[handle].num_tokens == 0, "some of the tokens before were committed: all goes"
    elif how == "drop":
        manager.reset(handle)
    else:
        manager.open_commits.conclude(handle)
        assert manager[handle].num_commits == 1
    assert not manager.open_commits.concerns(handle)
    others = [handle_of(engine, name) for name in "acd"]
    assert all(manager.open_commits.concerns(other) for other in others)
    settle_rest(engine, manager)
    assert all(manager[other].num_commits == 1 for other in others)
    for name in NAMES:
        with contextlib.suppress(Exception):
            engine.end_conversation(name)
    drain(engine)
    assert manager.budget.used_bytes == 0


def test_a_turn_goes_on_whose_own_commit_finds_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs its cache now; whether somebody else's goes is seen at the next step boundary."""
    engine, _, manager = begin("drawing")

    def short(plan: LinePlan, line: LineResult) -> CommitReservation:
        raise OutOfMemoryError("no room")

    monkeypatch.setattr(manager, "reserve_publish", short)
    engine.submit(Request("b1", "more", SamplingParams(max_tokens=1), "b"))
    assert isinstance(last_of(drain_turns(engine), "b1"), FinishEvent)
    assert under_way(engine) == ["a", "c", "d"] and engine.stats().evictions["memory"] == 0
    monkeypatch.undo()
    settle_rest(engine, manager)


def drain_turns(engine: Engine) -> list[object]:
    events: list[object] = []
    while engine.has_turns():
        events += engine.step()[0]
    return events


def kept(engine: Engine) -> dict[str, tuple[KvTables, KvImage]]:
    """Tables and bytes of every conversation, whatever the ids of its pages and blocks."""
    executor = engine._executor
    assert isinstance(executor, PagedExecutor)
    transfer = KvTransfer(executor.storage)
    found = {}
    for name in NAMES:
        kv = engine._manager[handle_of(engine, name)]
        found[name] = (tables_of(kv), transfer.copy_out(place_of(kv)))
    return found


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "streaming-llm", "pyramidkv-pooled"])
def test_a_batch_writes_what_one_by_one_is_written(
    tiny_engine_dir: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    found = []
    for most, aside in ((1, False), (1, True), (8, False), (8, True)):
        monkeypatch.setattr(maintenance, "MOST_COMMITS", most)
        config = RuntimeConfig(16 << 20, num_threads=1, tokens_per_step=400, background_commits=aside)
        engine = load_engine(tiny_engine_dir, config, verify=False)
        end_turns_together(engine, 60, policy)
        drain(engine)
        assert engine.stats().commits == len(NAMES) and engine.stats().commit_time_ms > 0
        engine._manager.check_invariants()
        found.append(kept(engine))
        engine.close(1.0)
    for name in NAMES:
        tables, image = found[0][name]
        assert tables.block_lens and image.blocks
        for other in found[1:]:
            assert other[name][0] == tables
            assert [bytes(x) for x in parts(other[name][1])] == [bytes(x) for x in parts(image)]


def parts(image: KvImage) -> tuple[bytes, ...]:
    return image.pages, image.seen, image.blocks, image.score  # type: ignore[return-value]
