"""What a client is told of its answer: whole words, whole characters, true numbers."""

from __future__ import annotations

import dataclasses

import pytest
from simulated_engine import drain, last_of, make_engine, text_of

from runtime.config import RuntimeConfig
from runtime.request import Event, FinishEvent, Request, SamplingParams, TextEvent

CONFIG = RuntimeConfig(kv_memory_bytes=1 << 20, tokens_per_step=64)


def answer(text: str = "tell me", **sampling: object) -> tuple[list[Event], FinishEvent]:
    """One turn of a fresh engine, whose text depends on the prompt only."""
    engine, _, _ = make_engine(CONFIG)
    params = dataclasses.replace(SamplingParams(max_tokens=40), **sampling)  # type: ignore[arg-type]
    engine.submit(Request("r", text, params))
    events = drain(engine)
    end = last_of(events, "r")
    assert isinstance(end, FinishEvent)
    return events, end


def test_one_log_probability_per_token_and_their_sum() -> None:
    events, end = answer(want_logprobs=True)
    parts = [event.logprobs for event in events if isinstance(event, TextEvent)] + [end.logprobs]
    flat = [value for part in parts for value in part]
    assert len(flat) == end.stats.generated_tokens == 40 and all(value < 0 for value in flat)
    assert end.cumulative_logprob == pytest.approx(sum(flat))
    so_far = 0.0
    for event in events:
        if isinstance(event, TextEvent):
            so_far += sum(event.logprobs)
            assert event.cumulative_logprob == pytest.approx(so_far)


def test_tokens_of_a_cut_stop_string_are_counted_with_the_end() -> None:
    plain = text_of(answer()[0], "r")
    events, end = answer(want_logprobs=True, stop=(plain[10:14],))
    assert text_of(events, "r") == plain[: plain.index(plain[10:14])] and end.stop_reason == plain[10:14]
    flat = [v for event in events if isinstance(event, TextEvent | FinishEvent) for v in event.logprobs]
    assert len(flat) == end.stats.generated_tokens


def test_no_log_probabilities_unless_asked_for() -> None:
    events, end = answer()
    assert end.logprobs == () and end.cumulative_logprob == 0.0
    assert all(event.logprobs == () for event in events if isinstance(event, TextEvent))


def test_bad_words_never_appear() -> None:
    plain = text_of(answer()[0], "r")
    bad = (plain[5:7], plain[20:23])
    changed = text_of(answer(bad=bad)[0], "r")
    assert len(changed) == 40 and not any(word in changed for word in bad)
    assert changed[:6] == plain[:6], "nothing changes before the first of them"


def test_many_stop_strings_at_once() -> None:
    plain = text_of(answer()[0], "r")
    never = tuple(f"{plain}{number}" for number in range(500))
    events, end = answer(stop=(*never, plain[30:33]))
    assert end.stop_reason == plain[30:33] and text_of(events, "r") == plain[: plain.index(plain[30:33])]
    events, end = answer(stop=never)
    assert end.reason == "length" and text_of(events, "r") == plain, "text held back comes out at the end"


def test_a_token_of_the_clients_choice_ends_the_answer() -> None:
    plain = text_of(answer()[0], "r")
    events, end = answer(end_id=ord(plain[12]) - 32)
    assert end.reason == "stop" and text_of(events, "r") == plain[: plain.index(plain[12])]
    assert end.stats.generated_tokens == plain.index(plain[12]) + 1


def test_times_are_in_order_and_zero_where_nothing_came() -> None:
    _, end = answer()
    stats = end.stats
    assert 0 < stats.arrival_ns <= stats.first_scheduled_ns <= stats.first_token_ns <= stats.last_token_ns
    _, none = answer(max_tokens=0)
    assert none.stats.first_scheduled_ns > 0 and none.stats.first_token_ns == none.stats.last_token_ns == 0
    assert none.stats.generated_tokens == 0
