"""A turn that was taken and whose answer was lost is told again, not taken twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from replicas import TEXTS, Replica
from simulated_engine import drain, last_of, make_engine, text_of

from runtime.config import RuntimeConfig
from runtime.errors import ConversationBusyError, RequestError
from runtime.request import Event, FinishEvent, Message, Request, SamplingParams, TextEvent
from runtime.retelling import NOTE

CONFIG = RuntimeConfig(kv_memory_bytes=1 << 20, tokens_per_step=24, probe_tokens_per_step=16)
SAMPLING = SamplingParams(max_tokens=10, want_logprobs=True)


def ask(request_id: str, text: str, turn_id: str | None, **more: Any) -> Request:
    return Request(request_id, text, **{"sampling": SAMPLING, "conversation_id": "c", **more}, turn_id=turn_id)


def test_the_answer_is_told_again_and_nothing_is_taken() -> None:
    engine, _, _ = make_engine(CONFIG)
    engine.submit(ask("a", "hello", "first"))
    events = drain(engine)
    tokens, steps = list(engine.conversation("c").tokens), engine.stats().steps
    engine.submit(ask("b", "hello", "first"))
    assert engine.has_turns()
    again = drain(engine)
    assert text_of(again, "b") == text_of(events, "a") != ""
    told, end, before = again[0], last_of(again, "b"), last_of(events, "a")
    assert isinstance(told, TextEvent) and isinstance(end, FinishEvent) and isinstance(before, FinishEvent)
    logprobs = [p for event in events if isinstance(event, TextEvent | FinishEvent) for p in event.logprobs]
    assert [*told.logprobs, *end.logprobs] == logprobs
    assert (end.reason, end.stop_reason, end.cumulative_logprob) == (
        before.reason, before.stop_reason, before.cumulative_logprob,
    )  # fmt: skip
    assert end.stats.recomputed_reason == NOTE and end.stats.generated_tokens == 0
    assert end.stats.reused_tokens == len(tokens) and end.stats.kv == before.stats.kv
    assert engine.conversation("c").tokens == tokens and engine.stats().steps == steps
    assert not engine.has_turns()


def test_the_conversation_goes_on_as_if_it_had_been_asked_once() -> None:
    answers = []
    for tries in (1, 3):
        engine, _, manager = make_engine(CONFIG, policy="commitkv")
        for turn, text in enumerate(("hello", "hello", "something else")):  # the same words twice are two turns
            events = []
            for attempt in range(tries):
                engine.submit(ask(f"{turn}/{attempt}", text, f"turn {turn}"))
                events = drain(engine)
            answers.append(text_of(events, f"{turn}/{tries - 1}"))
            manager.check_invariants()
    assert answers[:3] == answers[3:]


def test_a_name_is_of_one_text() -> None:
    engine, _, _ = make_engine(CONFIG)
    engine.submit(ask("a", "hello", "first"))
    drain(engine)
    tokens = list(engine.conversation("c").tokens)
    with pytest.raises(RequestError, match="turn_id: got 'first', the name of the turn before, with another text"):
        engine.submit(ask("b", "good bye", "first"))
    assert engine.conversation("c").tokens == tokens and not engine.has_turns()


def test_only_the_newest_turn_is_remembered_and_only_by_a_name() -> None:
    engine, _, _ = make_engine(CONFIG)
    for request_id, turn_id in (("a", "first"), ("b", None), ("c", "first"), ("d", None), ("e", None)):
        held = len(engine.conversation("c").tokens) if request_id != "a" else 0
        engine.submit(ask(request_id, "hello", turn_id))
        end = last_of(drain(engine), request_id)
        assert isinstance(end, FinishEvent) and end.stats.recomputed_reason == ""
        assert len(engine.conversation("c").tokens) > held


def test_while_it_runs_it_is_busy_and_what_was_undone_is_taken() -> None:
    engine, _, _ = make_engine(CONFIG)
    engine.submit(ask("a", "hello", "first"))
    engine.step()
    with pytest.raises(ConversationBusyError):
        engine.submit(ask("b", "hello", "first"))
    engine.cancel("a")
    drain(engine)
    engine.submit(ask("b", "hello", "first"))
    end = last_of(drain(engine), "b")
    assert isinstance(end, FinishEvent) and end.stats.generated_tokens == 10


def test_an_undone_turn_leaves_the_one_before_to_be_told() -> None:
    engine, _, _ = make_engine(CONFIG)
    engine.submit(ask("a", "hello", "first"))
    answer = text_of(drain(engine), "a")
    engine.submit(ask("b", "more", "second"))
    engine.step()
    engine.cancel("b")
    drain(engine)
    engine.submit(ask("c", "hello", "first"))
    assert text_of(drain(engine), "c") == answer


def test_a_chat_sent_whole_is_told_again_too() -> None:
    engine, _, _ = make_engine(CONFIG)
    for request_id in ("a", "b"):
        engine.submit(ask(request_id, "", "first", messages=(Message("user", "hello"),)))
        end = last_of(drain(engine), request_id)
        assert isinstance(end, FinishEvent)
    assert end.stats.recomputed_reason == NOTE


def test_a_conversation_that_ends_meanwhile_is_told_all_the_same() -> None:
    engine, _, manager = make_engine(CONFIG)
    engine.submit(ask("a", "hello", "first"))
    answer = text_of(drain(engine), "a")
    engine.submit(ask("b", "hello", "first"))
    engine.end_conversation("c")
    events = drain(engine)
    assert text_of(events, "b") == answer and isinstance(last_of(events, "b"), FinishEvent)
    assert manager.budget.used_bytes == 0 and not engine.has_turns()


def test_an_answer_without_text_has_an_end() -> None:
    engine, _, _ = make_engine(CONFIG)
    silent = dataclasses.replace(SAMPLING, max_tokens=0)
    for request_id in ("a", "b"):
        engine.submit(ask(request_id, "hello", "first", sampling=silent))
        [end] = drain(engine)
        assert isinstance(end, FinishEvent) and end.request_id == request_id
    assert end.stats.recomputed_reason == NOTE


@pytest.mark.parametrize("policy", ["full", "commitkv"])
def test_another_replica_tells_what_was_written(replica: Callable[..., Replica], policy: str) -> None:
    alone = replica()
    expected = [alone.turn(text, "alone", policy=policy)[0] for text in TEXTS]
    here, there = replica(), replica()
    here.turn(TEXTS[0], policy=policy)
    lost, _ = here.turn(TEXTS[1], turn_id="second")
    told, end = there.turn(TEXTS[1], turn_id="second")
    assert told == lost == expected[1] and end.stats.recomputed_reason == NOTE
    assert end.stats.kv.kv_bytes > 0, "its cache is there again before the answer is told"
    assert [there.turn(text)[0] for text in TEXTS[2:]] == expected[2:]


def test_a_replica_tells_again_once_it_is_written(replica: Callable[..., Replica]) -> None:
    here = replica(checkpoint_wait_s=20.0)
    for num_written in (1, 2):
        request_id = here.submit(TEXTS[0], turn_id="first", policy="full")
        events: list[Event] = []
        while not any(isinstance(event, FinishEvent) for event in events):
            events += here.engine.step()[0]
            here.engine.wait_for_work(0.01)
        assert last_of(events, request_id) == events[-1]
        assert here.checkpoints.figures().written == num_written
