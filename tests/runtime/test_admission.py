"""What a turn may come to hold, who may run beside whom, and refusals that say when to come back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engine import LIMITS, SPEC, drain, eager, last_of, make_engine

from runtime.admission import Admission
from runtime.config import RuntimeConfig
from runtime.conversation import Conversation
from runtime.errors import QueueFullError, TurnTooLargeError
from runtime.kv_manager import KvManager
from runtime.policy.registry import ALL_POLICIES, get_policy
from runtime.request import FinishEvent, Request, SamplingParams
from runtime.wiring import load_engine, load_parts

POLICY = eager(ALL_POLICIES["quantize-int4"])


def make(pages: int, **options: float) -> tuple[Admission, KvManager]:
    _, _, manager = make_engine(RuntimeConfig(kv_memory_bytes=1 << 20))
    total = manager.budget.headroom_bytes + pages * manager.page_layout.page_bytes
    config = RuntimeConfig(kv_memory_bytes=total, tokens_per_step=16, **options)  # type: ignore[arg-type]
    manager = KvManager(SPEC, LIMITS, total)
    return Admission(manager, LIMITS, config), manager


def full(handle: int = 0) -> Conversation:
    return Conversation(handle, None, get_policy("full"))


def test_a_turn_is_counted_in_pages_to_its_last_cached_token() -> None:
    admission, manager = make(20)
    page = manager.page_layout.page_bytes
    for prompt, max_tokens, pages in ((8, 0, 1), (8, 1, 1), (8, 2, 2), (1, 16, 2), (1, 17, 3), (599, 100, 75)):
        assert admission.peak_bytes(full(), prompt, max_tokens) == pages * page, (prompt, max_tokens)
    manager.open(0, get_policy("full"))
    manager.settle_rows(manager.reserve_rows(0, 13))
    assert admission.peak_bytes(full(), 16, 1) == 2 * page
    assert admission.peak_bytes(full(), 16, 2) == 3 * page


def test_a_policy_that_compresses_under_pressure_is_counted_with_what_it_leaves() -> None:
    admission, _ = make(200)
    lazy = dataclasses.replace(POLICY, schedule=dataclasses.replace(POLICY.schedule, at_watermark=False))
    plain, small = (
        [admission.peak_bytes(Conversation(0, None, policy), 500, m) for m in (1, 90)] for policy in (lazy, POLICY)
    )
    assert plain == [admission.peak_bytes(full(), 500, m) for m in (1, 90)]
    assert small[0] < plain[0] and small[1] - small[0] < plain[1] - plain[0]


def test_what_can_never_fit_is_refused_with_every_way_out() -> None:
    admission, _ = make(10)
    admission.check_size(full(), 60, 21)
    with pytest.raises(
        TurnTooLargeError, match=r"60 tokens .* max_tokens 22 .* lower max_tokens.* raise kv_memory_bytes"
    ):
        admission.check_size(full(), 60, 22)
    admission, manager = make(10, max_conversation_bytes=3000)
    tokens = 3000 // manager.page_layout.page_bytes * LIMITS.page_tokens
    admission.check_size(full(), tokens, 0)
    with pytest.raises(TurnTooLargeError, match="raise max_conversation_bytes"):
        admission.check_size(full(), tokens + 1, 0)


def test_a_full_queue_says_when_a_place_may_be_free() -> None:
    admission, _ = make(10, max_waiting=8, max_tenant_waiting=2)
    admission.check_queue(7, "a", 1)
    with pytest.raises(QueueFullError, match="8 turns are waiting, at most 8 may; try again in 1 s") as caught:
        admission.check_queue(8, "a", 0)
    assert caught.value.retry_after_s == 1
    for _ in range(50):
        admission.turn_took(6.0)
    with pytest.raises(QueueFullError, match="try again in 12 s"):
        admission.check_queue(8, "a", 0)  # 8 turns of 6 s, 4 at a time
    with pytest.raises(QueueFullError, match="2 turns of tenant 'a' are waiting, at most 2 may; try again in 3 s"):
        admission.check_queue(2, "a", 2)


def test_turns_run_side_by_side_only_as_far_as_both_fit_to_the_end() -> None:
    """Eight turns of 5 pages each in 16 pages: three at a time, and none of them ever loses its cache."""
    _, manager = make(16)
    engine, _, manager = make_engine(
        RuntimeConfig(kv_memory_bytes=manager.budget.total_bytes, tokens_per_step=24, watermark=1.0)
    )
    for i in range(8):
        engine.submit(Request(f"r{i}", "x" * 8, SamplingParams(max_tokens=33)))
    running, events = 0, []
    while engine.has_turns():
        events += engine.step()[0]
        running = max(running, engine.stats().running)
    assert running == 3 and engine.stats().evictions["preempted"] == 0
    assert all(isinstance(last_of(events, f"r{i}"), FinishEvent) for i in range(8))


@settings(max_examples=30, deadline=None)
@given(
    pages=st.integers(9, 40),
    turns=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 60)), min_size=1, max_size=12),
    batch=st.integers(2, 40),
)
def test_every_turn_that_is_taken_finishes_without_starting_over(
    pages: int, turns: list[tuple[int, int]], batch: int
) -> None:
    _, sized = make(pages)
    config = RuntimeConfig(kv_memory_bytes=sized.budget.total_bytes, tokens_per_step=batch)
    engine, _, manager = make_engine(config)
    taken = []
    for i, (length, max_tokens) in enumerate(turns):
        try:
            engine.submit(Request(f"r{i}", "ab cd"[i % 5] * length, SamplingParams(max_tokens=max_tokens)))
        except TurnTooLargeError:
            assert length + max_tokens > pages * LIMITS.page_tokens
        else:
            taken.append(f"r{i}")
    events = drain(engine, 5000)
    assert all(isinstance(last_of(events, name), FinishEvent) for name in taken)
    assert engine.stats().evictions["preempted"] == 0
    assert manager.budget.used_bytes == 0


@pytest.mark.parametrize("name", ["commitkv", "quantize-int4", "h2o", "streaming-llm"])
def test_memory_of_just_the_predicted_bytes_is_enough_for_a_real_turn(name: str, tiny_engine_dir: Path) -> None:
    """A prompt that would take twice the memory in pages, under the policy as it ships."""
    num_tokens, max_tokens = 3000, 30
    parts = load_parts(tiny_engine_dir, RuntimeConfig(kv_memory_bytes=16 << 20, num_threads=1), verify=False)
    conversation = Conversation(0, None, get_policy(name))
    peak = Admission(parts.manager, parts.limits, parts.config).peak_bytes(conversation, num_tokens, max_tokens)
    total = parts.manager.budget.headroom_bytes + peak
    assert 2 * peak < num_tokens // parts.limits.page_tokens * parts.manager.page_layout.page_bytes
    engine = load_engine(tiny_engine_dir, RuntimeConfig(kv_memory_bytes=total, num_threads=1), verify=False)
    text = "".join(chr(97 + i * i % 23) for i in range(num_tokens))
    engine.submit(Request("r", text, SamplingParams(max_tokens=max_tokens), policy=name))
    end = last_of(drain(engine), "r")
    assert isinstance(end, FinishEvent) and end.stats.generated_tokens == max_tokens, end
    assert end.stats.kv.peak_kv_bytes <= total
