"""A conversation that has outgrown its scores is read again, in idle time; text that nobody has read again is kept."""

from __future__ import annotations

import dataclasses

import pytest
from simulated_engine import EAGER, drain
from watched_engine import CONFIG, PROMPT, Watched, watch

import runtime.maintenance as maintenance
import runtime.policy.registry as registry
from runtime.commit_planner import make_line_plan
from runtime.config import RuntimeConfig
from runtime.errors import ConfigError
from runtime.kv_manager import KvManager
from runtime.policy.base import Policy, Schedule
from runtime.request import ErrorEvent, Request, SamplingParams
from runtime.step import ProbePlan


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return watch(monkeypatch)


def read_again(plans: list[ProbePlan], tokens: list[int]) -> bool:
    """Whether the pieces together are the text from its beginning, each behind a short lead."""
    text: list[int] = []
    for plan in plans:
        piece = list(plan.token_ids[PROMPT:])
        lead = min(8, len(text))
        assert piece[:lead] == text[len(text) - lead :]
        text += piece[lead:]
    return text == tokens[: len(text)]


def test_a_grown_conversation_is_read_again_from_its_beginning(watched: Watched) -> None:
    watched.turn("hello " * 10)
    drain(watched.engine)
    assert not any(plan.fades for plan in watched.done)
    first = watched.kv.reread_at
    assert first == watched.kv.num_tokens
    while watched.kv.num_tokens < 1.5 * first:
        before = len(watched.done)
        watched.turn("more of it")
        drain(watched.engine)
    fading = [i for i, plan in enumerate(watched.done) if plan.fades]
    assert len(fading) == 1 and fading[0] >= before, "once, as soon as it had grown by half"
    again = watched.done[fading[0] :]
    tokens = watched.engine.conversation("c").tokens
    assert read_again(again, tokens)
    assert sum(len(p.token_ids) - PROMPT for p in again) >= watched.kv.num_tokens - EAGER.recent_tokens
    assert watched.kv.reread == [] and watched.kv.reread_at == watched.kv.num_tokens


def test_a_new_turn_interrupts_it_and_it_goes_on_where_it_was(watched: Watched) -> None:
    watched.turn("hello " * 10)
    drain(watched.engine)
    while not watched.kv.reread:
        watched.turn("more of it")
        while watched.engine.has_turns():
            watched.engine.step()
        while not watched.kv.reread and watched.engine.step()[1]:
            pass
    start = watched.kv.reread[0]
    watched.interrupt = True
    watched.engine.step()
    assert watched.kv.reread[0] == start, "the piece stays to be read"
    watched.turn("another")
    drain(watched.engine)
    assert watched.kv.reread == []
    fading = [plan for plan in watched.done if plan.fades]
    assert len(fading) == 1, "scores fade once in a pass, however often it is interrupted"
    watched.manager.check_invariants()


def test_nothing_is_read_again_unless_asked(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = registry.ALL_POLICIES["reread"]
    monkeypatch.setitem(registry.ALL_POLICIES, "reread", dataclasses.replace(policy, schedule=EAGER))
    for _ in range(6):
        watched.turn("hello " * 10)
        drain(watched.engine)
    assert watched.done and not any(plan.fades for plan in watched.done)


def test_a_turn_that_is_undone_takes_its_positions_along(watched: Watched) -> None:
    watched.turn("hello " * 10)
    drain(watched.engine)
    kv = watched.kv
    kv.reread = [(0, 20), (30, kv.num_tokens + 9)]
    kv.unprobed = []
    watched.manager.truncate(watched.engine.conversation("c").handle, kv.num_tokens - 1)
    assert kv.reread == [(0, 20), (30, kv.num_tokens)]


def test_staged_text_that_nobody_has_read_again_is_kept_whole(watched: Watched) -> None:
    watched.turn("hello " * 10)
    while watched.engine.has_turns():
        watched.engine.step()
    kv = watched.kv
    assert kv.num_staged and kv.unprobed
    plan = make_line_plan(0, kv, 1)
    assert plan.keep_entries == len(plan.staged_slots) * kv.num_rows
    kv.unprobed = []
    assert make_line_plan(0, kv, 1).keep_entries < plan.keep_entries


def test_a_busy_engine_commits_overdue_text_whole_and_reads_it_again_later(watched: Watched) -> None:
    watched.engine.submit(Request("long", "keeps the engine busy", SamplingParams(max_tokens=100)))
    watched.turn("hello " * 40)
    while not watched.engine.stats().commits:
        assert watched.engine.has_turns()
        watched.engine.step()
    assert watched.engine.stats().running and not watched.done
    assert watched.kv.unprobed, "it stays marked"
    drain(watched.engine)
    assert not watched.kv.unprobed
    assert sum(len(p.token_ids) - PROMPT for p in watched.done) >= 200
    kept = sum(watched.kv.blocks.lens)
    assert kept < 0.5 * watched.kv.committed_tokens * watched.kv.num_rows, "its line was drawn when it had been read"


def test_an_idle_engine_reads_a_long_turn_before_it_commits_it(watched: Watched) -> None:
    watched.turn("hello " * 40)
    while watched.engine.has_turns():
        watched.engine.step()
    assert watched.kv.num_staged >= maintenance.OVERDUE_SPANS * EAGER.span_tokens, "more than a busy engine would keep"
    while not watched.engine.stats().commits:
        watched.engine.step()
    assert not watched.kv.unprobed and not watched.kv.whole


def busy_beside_idle(watched: Watched) -> None:
    """A conversation that has just ended a long turn, while another one goes on for long."""
    watched.turn("hello " * 40)
    watched.engine.submit(Request("long", "keeps the engine busy", SamplingParams(max_tokens=150)))
    while watched.engine.conversation("c").turn is not None:
        watched.engine.step()


def test_short_memory_compresses_idle_conversations_beside_the_steps_of_others(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KvManager, "pressure", property(lambda _: maintenance.PRESSED))
    busy_beside_idle(watched)
    before = watched.manager.kv_bytes(watched.engine.conversation("c").handle)
    while watched.kv.unprobed or watched.kv.num_staged or watched.kv.whole:
        assert watched.engine.has_turns(), "it did not wait until the engine was idle"
        watched.engine.step()
    assert sum(len(p.token_ids) - PROMPT for p in watched.done) >= 200
    assert watched.manager.kv_bytes(watched.engine.conversation("c").handle) < 0.7 * before


def test_steps_of_others_are_not_outrun_by_it(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decode row allows a few tokens to be re-read, so that nobody waits long for the next one."""
    monkeypatch.setattr(KvManager, "pressure", property(lambda _: maintenance.PRESSED))
    monkeypatch.setattr(maintenance, "LEAST_ALLOWED", 4)
    monkeypatch.setattr(maintenance, "MOST_PIECES", 1)
    busy_beside_idle(watched)
    pieces, steps = len(watched.done), watched.engine.stats().steps
    for _ in range(20):
        watched.engine.step()
    pieces, steps = len(watched.done) - pieces, watched.engine.stats().steps - steps
    assert watched.kv.unprobed, "there is more to do"
    assert 0 < pieces <= 1 + steps * 4 // 16 + steps // EAGER.every_steps  # the last: reviews


def test_what_can_be_compressed_is_before_a_cache_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second conversation finds room in what the first one does not need, and that one goes on where it was."""

    def hold_one(config: RuntimeConfig) -> Watched:
        watched = watch(monkeypatch, config)
        watched.turn("hello " * 40)
        while watched.engine.has_turns():
            watched.engine.step()
        return watched

    monkeypatch.setattr(maintenance, "PRESSED", 2.0)  # nothing is done ahead
    needed = hold_one(CONFIG).manager.budget.used_bytes
    watched = hold_one(dataclasses.replace(CONFIG, kv_memory_bytes=int(1.3 * needed)))
    assert not watched.done
    watched.engine.submit(Request("other", "hello " * 40, SamplingParams(max_tokens=1), "d"))
    while watched.engine.has_turns():
        watched.engine.step()
    assert watched.engine.stats().commits and not watched.kv.num_staged
    assert sum(watched.engine.stats().evictions.values()) == 0
    watched.turn("and on")
    assert not any(isinstance(event, ErrorEvent) for event in drain(watched.engine))


def test_text_that_finds_no_room_to_be_read_holds_nobody_up(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a step would wait for it while idle caches could be dropped."""
    watched.turn("hello " * 40)
    while watched.engine.has_turns():
        watched.engine.step()
    upkeep = watched.engine._maintenance
    assert upkeep.can_compress()
    monkeypatch.setattr(upkeep, "_next_probe", lambda *_, **__: None)
    monkeypatch.setattr(upkeep, "_commits", lambda _: None)
    assert upkeep.compress() is None and not upkeep.can_compress()
    monkeypatch.undo()
    upkeep.turn_ended(watched.engine.conversation("c"))
    assert upkeep.can_compress() and upkeep.compress() is not None


def test_growth_that_would_never_rest_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.reread_growth"):
        Policy(name="restless", score="probe", schedule=Schedule(reread_growth=1.01))
