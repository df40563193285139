"""A conversation that has outgrown its scores is computed anew beside its cache, and the new one takes its place."""

from __future__ import annotations

import contextlib
import dataclasses
import random

import pytest
from simulated_engine import EAGER, drain
from watched_engine import CONFIG, PROMPT, Watched, watch

import runtime.maintenance as maintenance
from runtime.errors import CommitKVError, ConfigError
from runtime.kv_state import twin_of
from runtime.lifecycle import State
from runtime.policy.base import Policy, Schedule
from runtime.request import ErrorEvent, Request, SamplingParams
from runtime.step import ProbePlan


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return watch(monkeypatch, renew=True)


def anew(watched: Watched) -> list[ProbePlan]:
    """Pieces that were computed for twins."""
    return [plan for plan in watched.done if plan.handle < 0 and plan.first_scored_row == len(plan.token_ids)]


def reread(watched: Watched) -> list[ProbePlan]:
    """Pieces that were read again in twins."""
    return [plan for plan in watched.done if plan.handle < 0 and plan.first_scored_row == PROMPT]


def outgrow(watched: Watched) -> None:
    """Turns up to the one with which the conversation has grown by half; nothing of the idle time behind it."""
    watched.turn("hello " * 10)
    drain(watched.engine)
    first = watched.kv.reread_at
    while True:
        watched.turn("more of it")
        while watched.engine.has_turns():
            watched.engine.step()
        if watched.kv.num_tokens >= 1.5 * first:
            return
        drain(watched.engine)


def begin_twin(watched: Watched) -> None:
    """Up to the first piece of the twin."""
    outgrow(watched)
    while not anew(watched):
        assert watched.engine.step()[1]


def test_all_of_a_grown_conversation_is_computed_and_read_and_compressed_once(watched: Watched) -> None:
    outgrow(watched)
    old, evicted = watched.kv, watched.engine.kv_stats("c").evicted
    assert evicted > 0 and not anew(watched)
    drain(watched.engine)
    kv, tokens = watched.kv, watched.engine.conversation("c").tokens
    assert kv is not old and not watched.manager.twins
    assert [t for plan in anew(watched) for t in plan.token_ids] == tokens[: kv.num_tokens]
    assert [plan.first_position for plan in anew(watched)] == list(range(0, kv.num_tokens, 16))
    assert sum(len(p.token_ids) - PROMPT for p in reread(watched)) >= kv.committed_tokens
    assert not any(plan.fades for plan in watched.done), "there are no older scores in it"
    assert kv.num_commits == 1 and kv.reread_at == kv.num_tokens and not kv.unprobed and not kv.num_staged
    assert kv.committed_tokens >= kv.num_tokens - EAGER.recent_tokens - 2 * watched.manager.page_tokens
    assert kv.ledger[State.COMMITTED] < kv.committed_tokens * kv.num_rows
    watched.manager.check_invariants()
    watched.turn("and it goes on")
    assert not any(isinstance(event, ErrorEvent) for event in drain(watched.engine))


def test_the_conversation_never_holds_more_for_it(watched: Watched) -> None:
    outgrow(watched)
    most = watched.manager.kv_bytes(watched.handle)
    while watched.engine.step()[1]:
        assert watched.manager.kv_bytes(watched.handle) <= most
    assert anew(watched) and watched.engine.kv_stats("c").peak_kv_bytes < 2 * most


def test_a_turn_in_between_finds_the_cache_and_makes_the_twin_longer(watched: Watched) -> None:
    begin_twin(watched)
    old, num_tokens = watched.kv, watched.kv.num_tokens
    watched.turn("a turn")
    while watched.engine.has_turns():
        watched.engine.step()
    assert watched.kv is old and old.num_tokens > num_tokens
    assert watched.manager.twins == [watched.handle]
    drain(watched.engine)
    assert watched.kv is not old
    computed = [t for plan in anew(watched) for t in plan.token_ids]
    assert computed == watched.engine.conversation("c").tokens[: watched.kv.num_tokens], "nothing was computed twice"
    watched.manager.check_invariants()


def test_a_piece_that_gives_way_is_done_later(watched: Watched) -> None:
    begin_twin(watched)
    twin = watched.manager[twin_of(watched.handle)]
    num_tokens, used = twin.num_tokens, watched.manager.budget.used_bytes
    watched.interrupt = True
    watched.engine.step()
    assert (twin.num_tokens, watched.manager.budget.used_bytes) == (num_tokens, used)
    watched.manager.check_invariants()
    drain(watched.engine)
    assert watched.kv is twin


def test_memory_that_is_asked_for_takes_the_twin_and_no_cache(watched: Watched) -> None:
    begin_twin(watched)
    evictor, old = watched.engine._scheduler.evictor, watched.kv
    used = watched.manager.budget.used_bytes
    assert evictor.drop_one(()) and not watched.manager.twins
    assert watched.manager.budget.used_bytes < used and watched.kv is old and old.num_tokens
    assert watched.engine.stats().evictions["memory"] == 0
    drain(watched.engine)
    assert watched.kv is not old, "it is begun again once there is room"
    watched.manager.check_invariants()


def test_a_step_that_finds_no_pages_takes_them_from_the_twin(watched: Watched) -> None:
    begin_twin(watched)
    room = watched.manager.max_tokens - watched.manager.budget.used_bytes // watched.manager.page_layout.page_bytes * 8
    watched.engine.submit(Request("big", "x" * min(580, room - 8), SamplingParams(max_tokens=1), "d"))
    watched.engine.submit(Request("big2", "y" * 580, SamplingParams(max_tokens=1), "e"))
    while watched.engine.has_turns():
        assert not any(isinstance(event, ErrorEvent) for event in watched.engine.step()[0])
    assert watched.kv.num_tokens and watched.engine.stats().evictions["memory"] == 0
    watched.manager.check_invariants()


def test_short_memory_leaves_it_at_reading_what_is_kept(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    outgrow(watched)
    monkeypatch.setattr(watched.engine._maintenance._renewal, "_share", 0.0)
    old = watched.kv
    drain(watched.engine)
    assert watched.kv is old and not anew(watched)
    assert sum(plan.fades for plan in watched.done) == 1 and old.reread_at == old.num_tokens


def test_a_chat_cut_short_takes_a_longer_twin_along(watched: Watched) -> None:
    begin_twin(watched)
    while watched.manager[twin_of(watched.handle)].num_tokens < watched.kv.num_tokens:
        watched.engine.step()
    newest = watched.kv.pages[-1].positions[0]
    freed = watched.manager.truncate(watched.handle, newest + 1)
    assert freed is not None and not watched.manager.twins
    assert len(freed.page_ids) >= newest // watched.manager.page_tokens, "its pages are told to the device"
    watched.manager.check_invariants()


def test_a_conversation_that_ends_takes_its_twin_along(watched: Watched) -> None:
    begin_twin(watched)
    watched.engine.end_conversation("c")
    drain(watched.engine)
    assert not watched.manager.twins and watched.manager.budget.used_bytes == 0
    watched.manager.check_invariants()


def test_what_a_turn_protects_meanwhile_stays_whole(watched: Watched) -> None:
    begin_twin(watched)
    first = len(watched.engine.conversation("c").tokens)
    request = Request("p", "keep these words", SamplingParams(max_tokens=1), "c", protect=((0, 16),))
    watched.engine.submit(request)
    drain(watched.engine)
    for _ in range(4):
        watched.turn("more of it and more")
        drain(watched.engine)
    protected = [(start, end) for start, end in watched.kv.protected_ranges() if start >= first]
    assert protected and all(end - start == 16 for start, end in protected)
    in_pages = {p for page in watched.kv.pages for p in page.positions}
    assert set(range(*protected[0])) <= in_pages
    watched.manager.check_invariants()


def test_a_shared_system_prompt_stays_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, dataclasses.replace(CONFIG, kv_memory_bytes=1 << 21), renew=True)
    system = "be brief and kind to everybody"
    for name in ("c", "d"):
        watched.engine.submit(
            Request(f"s-{name}", "hello " * 10, SamplingParams(max_tokens=1), name, system_prompt=system)
        )
        drain(watched.engine)
    shared = list(watched.manager.shared.held(watched.handle))
    assert shared
    old = watched.kv
    for _ in range(6):
        watched.turn("more of it")
        drain(watched.engine)
        watched.manager.check_invariants()
    assert watched.kv is not old and watched.manager.shared.held(watched.handle) == shared
    assert len(anew(watched)) and anew(watched)[0].first_position == len(shared) * watched.manager.page_tokens
    for name in ("d", "c"):
        watched.engine.end_conversation(name)
        drain(watched.engine)
        watched.manager.check_invariants()
    assert watched.manager.budget.used_bytes == 0


def test_twins_do_not_count_as_pressure(watched: Watched) -> None:
    """Else they would set off what is done about it: text compressed beside steps, caches dropped."""
    begin_twin(watched)
    while watched.manager.twins:
        assert watched.manager.pressure < maintenance.PRESSED
        watched.engine.step()


def test_nothing_is_computed_anew_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch)
    outgrow(watched)
    drain(watched.engine)
    assert not anew(watched) and any(plan.fades for plan in watched.done)


def test_renewal_without_a_growth_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.renew"):
        Policy(name="never", score="probe", schedule=Schedule(renew=True))


@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_in_between_nothing_is_lost(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Turns, cancels, ends and demands for memory at any moment; the executor checks every row that is read."""
    draw = random.Random(seed)
    watched = watch(monkeypatch, dataclasses.replace(CONFIG, kv_memory_bytes=3 << 18), renew=True)
    engine, manager = watched.engine, watched.manager
    replaced: list[int] = []
    replace = manager.replace
    monkeypatch.setattr(manager, "replace", lambda handle: replaced.append(handle) or replace(handle))

    def turn(name: str) -> None:
        with contextlib.suppress(CommitKVError):  # it runs a turn, or is too long by now
            text = "ab cd"[draw.randrange(5)] * draw.randint(1, 60)
            engine.submit(Request(f"t{draw.random()}", text, SamplingParams(max_tokens=draw.randint(0, 6)), name))

    def undo(name: str) -> None:
        conversation = engine._table.find("", name)
        if conversation is not None and conversation.turn is not None:
            engine.cancel(conversation.turn.request.request_id)

    def end(name: str) -> None:
        with contextlib.suppress(CommitKVError):
            engine.end_conversation(name)

    for _ in range(150):
        action = draw.choices((turn, undo, end, None), (10, 2, 1, 1))[0]
        if action is None:
            engine._keeper.make_room()
        else:
            action(draw.choice("cd"))
        for _ in range(draw.choice((1, 3, 40))):
            engine.step()
            manager.check_invariants()
    for name in "cd":
        end(name)
    drain(engine)
    assert manager.budget.used_bytes == 0 and not manager.twins
    assert replaced
