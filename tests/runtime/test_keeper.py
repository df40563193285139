"""Limits on conversations, through the engine: who is ended or loses its cache, and what its client is told."""

from __future__ import annotations

import time

import pytest
from simulated_engine import drain, last_of, make_engine, policies_for_tests

import runtime.policy.registry as registry
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.errors import ConversationBusyError, OutOfMemoryError, RequestError, UnknownConversationError
from runtime.request import FinishEvent, Message, Request, SamplingParams, TurnStats

SECOND = 1_000_000_000


@pytest.fixture(autouse=True)
def small_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, policy in policies_for_tests().items():
        monkeypatch.setitem(registry.ALL_POLICIES, name, policy)


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1000 * SECOND

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns


def start(clock: Clock | None = None, **options: float) -> Engine:
    config = RuntimeConfig(kv_memory_bytes=1 << 20, tokens_per_step=24, **options)  # type: ignore[arg-type]
    return make_engine(config, clock_ns=clock or Clock())[0]


def turn(engine: Engine, name: str | None, text: str = "hello", **more: object) -> TurnStats:
    """Runs a turn to its end and all idle work after it."""
    request_id = f"{name} {time.monotonic_ns()}"
    sampling = SamplingParams(max_tokens=4)
    engine.submit(Request(request_id, text, sampling, name, **more))  # type: ignore[arg-type]
    end = last_of(drain(engine), request_id)
    assert isinstance(end, FinishEvent)
    return end.stats


def test_an_idle_conversation_ends_and_its_client_learns_why() -> None:
    clock = Clock()
    engine = start(clock, max_idle_s=600)
    turn(engine, "old")
    clock.now_ns += 300 * SECOND
    turn(engine, "young")
    clock.now_ns += 301 * SECOND
    engine.step()
    assert engine.kv_stats("young").active > 0
    for call in (lambda: engine.kv_stats("old"), lambda: turn(engine, "old")):
        with pytest.raises(UnknownConversationError, match="'old' was ended after 600 s idle; send the whole chat"):
            call()
    assert engine.stats().evictions["idle"] == 1 and engine.stats().conversations == 1


def test_after_an_ending_the_whole_chat_or_a_farewell_begin_anew() -> None:
    clock = Clock()
    engine = start(clock, max_idle_s=1)
    chat = (Message("user", "hello"), Message("assistant", "hi"), Message("user", "more"))
    for again in ("messages", "end"):
        turn(engine, "c")
        clock.now_ns += 2 * SECOND
        engine.step()
        if again == "messages":
            turn(engine, "c", text="", messages=chat)
        else:
            clock.now_ns += 2 * SECOND
            engine.step()
            engine.end_conversation("c")  # over already: as asked
            turn(engine, "c")
            with pytest.raises(UnknownConversationError, match="may have ended"):
                engine.end_conversation("d")


def test_a_long_turn_is_not_idleness() -> None:
    clock = Clock()
    engine = start(clock, max_idle_s=5)
    engine.submit(Request("r", "hello", SamplingParams(max_tokens=20), "c"))
    while engine.has_turns():
        clock.now_ns += 10 * SECOND
        engine.step()
    assert engine.kv_stats("c").active > 0


def test_the_wall_clock_may_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RuntimeConfig(kv_memory_bytes=1 << 20, max_idle_s=60, max_step_ms=50)
    engine, _, _ = make_engine(config)
    turn(engine, "c")
    monkeypatch.setattr(time, "time", lambda: 9e12)
    monkeypatch.setattr(time, "time_ns", lambda: pytest.fail("asked for the wall clock"))
    engine.step()
    stats = turn(engine, "c")
    assert 0 < stats.arrival_ns <= stats.first_token_ns <= stats.last_token_ns <= time.monotonic_ns()


def test_to_make_room_the_lower_priority_ends_first_then_the_longest_idle() -> None:
    clock = Clock()
    engine = start(clock, max_conversations=3)
    for name, priority in (("first", 0), ("low", -1), ("second", 0)):
        turn(engine, name, priority=priority)
    clock.now_ns += 30 * SECOND
    for newcomer, ended in (("x", "low"), ("y", "first")):
        turn(engine, newcomer, priority=1)
        with pytest.raises(UnknownConversationError, match=r"ended to make room .*max_conversations 3.*, 30 s idle"):
            engine.kv_stats(ended)
    assert engine.kv_stats("second").active > 0


def test_two_hundred_idle_conversations_of_one_tenant_do_not_push_out_anothers() -> None:
    engine = start(max_conversations=200)
    turn(engine, "mine", tenant="modest", priority=-5)
    for i in range(220):
        turn(engine, f"c{i}", tenant="greedy", priority=5)
    assert engine.kv_stats("mine", "modest").active > 0
    assert engine.stats().conversations == 200 and engine.stats().evictions["count"] == 21


def test_a_tenants_own_limit_ends_its_own() -> None:
    engine = start(max_tenant_conversations=2)
    turn(engine, "theirs", tenant="b")
    for name in ("one", "two", "three"):
        turn(engine, name, tenant="a")
    with pytest.raises(UnknownConversationError, match="max_tenant_conversations 2"):
        engine.kv_stats("one", "a")
    assert engine.kv_stats("theirs", "b").active > 0
    engine.submit(Request("r1", "x", conversation_id="two", tenant="a"))
    engine.submit(Request("r2", "x", conversation_id="three", tenant="a"))
    with pytest.raises(OutOfMemoryError, match="taken by running turns"):
        engine.submit(Request("r3", "x", conversation_id="four", tenant="a"))


def test_an_id_of_another_tenant_is_unknown_and_can_neither_be_seen_nor_ended() -> None:
    engine = start()
    turn(engine, "c", "the password is plover", tenant="a")
    held = engine.kv_stats("c", "a")
    for other in ("b", ""):
        with pytest.raises(UnknownConversationError):
            engine.kv_stats("c", other)
        with pytest.raises(UnknownConversationError):
            engine.end_conversation("c", other)
    assert turn(engine, "c", "what is it?", tenant="b").reused_tokens == 0, "a conversation of its own"
    assert engine.kv_stats("c", "a") == held
    engine.submit(Request("r", "x", conversation_id="c", tenant="a"))
    engine.submit(Request("s", "x", conversation_id="c", tenant="b"))
    with pytest.raises(ConversationBusyError, match="one turn at a time"):
        engine.submit(Request("t", "x", conversation_id="c", tenant="b"))


def test_no_prefix_is_shared_between_tenants() -> None:
    engine = start()
    system = "you are a helpful assistant that answers in one word " * 2
    first = turn(engine, "a", system_prompt=system, tenant="t1")
    inside = turn(engine, "b", system_prompt=system, tenant="t1")
    across = turn(engine, "c", system_prompt=system, tenant="t2")
    assert (first.reused_tokens, across.reused_tokens) == (0, 0) and inside.reused_tokens > 0


def test_a_dropped_cache_is_told_with_the_tokens_it_cost() -> None:
    engine, _, manager = make_engine(RuntimeConfig(kv_memory_bytes=1 << 20))
    tight = manager.budget.headroom_bytes + 12 * manager.page_layout.page_bytes
    engine, _, manager = make_engine(RuntimeConfig(kv_memory_bytes=tight, tokens_per_step=24))
    sampling = SamplingParams(max_tokens=4)
    first = turn(engine, "a", "x" * 38)
    assert (first.recomputed_tokens, first.recomputed_reason) == (0, "")
    turn(engine, "b", "y" * 60)  # 67 tokens in 9 pages beside a's 6
    assert engine.kv_stats("a").kv_bytes < 1000
    back = turn(engine, "a", "z")
    held = 40 + 3  # "<" and ">" around the text, and all but the last token of the answer
    assert back.reused_tokens == 0 and back.recomputed_tokens == held
    assert back.recomputed_reason == f"kv dropped (memory), {held} tokens recomputed"
    assert turn(engine, "a", "z").recomputed_tokens == 0
    assert engine.stats().evictions["memory"] >= 1
    # A turn that is undone has lost nothing; one that comes after finds the cache whole.
    engine.submit(Request("r", "w" * 9, sampling, "a"))
    engine.step()
    engine.cancel("r")
    drain(engine)
    assert turn(engine, "a", "z").recomputed_tokens == 0


@pytest.mark.parametrize("bad", [{"max_idle_s": -1.0}, {"max_tenant_waiting": -1}, {"max_step_ms": float("nan")}])
def test_limits_are_checked(bad: dict[str, float]) -> None:
    with pytest.raises(Exception, match=next(iter(bad))):
        RuntimeConfig(**bad)  # type: ignore[arg-type]
    assert not issubclass(OutOfMemoryError, RequestError), "a full server is not the client's mistake"
