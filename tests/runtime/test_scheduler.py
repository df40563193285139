"""Fairness, places and pace, through the engine."""

from __future__ import annotations

from simulated_engine import drain, last_of, make_engine

from runtime.config import EngineLimits, RuntimeConfig
from runtime.request import Event, FinishEvent, Request, SamplingParams, TextEvent
from runtime.step import StepPlan, StepResult

LIMITS = EngineLimits(page_tokens=8, block_entries=16, max_seq_len=600, max_batch_size=4)
MS = 1_000_000


def config(**options: float) -> RuntimeConfig:
    return RuntimeConfig(kv_memory_bytes=1 << 22, tokens_per_step=24, **options)  # type: ignore[arg-type]


def ask(request_id: str, tenant: str, length: int = 40, max_tokens: int = 8, priority: int = 0) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(request_id, "x" * length, sampling, tenant=tenant, priority=priority)


def order_of_ends(events: list[Event]) -> list[str]:
    return [event.request_id for event in events if isinstance(event, FinishEvent)]


def test_a_tenant_with_a_long_queue_does_not_hold_up_one_with_a_short_one() -> None:
    engine, _, _ = make_engine(config(), limits=LIMITS)
    for i in range(20):
        engine.submit(ask(f"greedy{i}", "greedy"))
    for _ in range(4):
        engine.step()
    engine.submit(ask("modest", "modest"))
    ends = order_of_ends(drain(engine))
    assert len(ends) == 21 and ends.index("modest") <= 4, "the next place that is free"


def test_within_a_tenant_the_higher_priority_is_let_in_first() -> None:
    engine, _, _ = make_engine(config(), limits=LIMITS)
    for i in range(12):
        engine.submit(ask(f"r{i}", "", priority=int(i == 9)))
    assert order_of_ends(drain(engine)).index("r9") < 4


def test_prompts_of_two_tenants_are_read_in_turns() -> None:
    """A long prompt that came first does not keep a short one of another tenant from its first token."""
    engine, _, _ = make_engine(config(), limits=LIMITS)
    engine.submit(ask("long", "a", length=480))
    engine.step()
    engine.submit(ask("short", "b", length=48))
    steps = 0
    short = engine._table.of_request("short").turn  # type: ignore[union-attr]
    while not short.first_token_ns:  # type: ignore[union-attr]
        engine.step()
        steps += 1
    assert steps <= 6


def test_places_of_one_tenant_are_bounded_only_while_others_run() -> None:
    engine, _, _ = make_engine(config(max_tenant_running=2), limits=LIMITS)
    for i in range(6):
        engine.submit(ask(f"a{i}", "a"))
    most, events = 0, []
    engine.submit(ask("b0", "b"))
    while engine.has_turns():
        events += engine.step()[0]
        running = [c.tenant for c in engine._scheduler.running]
        most = max(most, running.count("a"))
    assert most == 2 and order_of_ends(events).index("b0") <= 2


def test_a_turn_that_finds_no_room_is_passed_only_so_often() -> None:
    _, _, manager = make_engine(config(), limits=LIMITS)
    total = manager.budget.headroom_bytes + 30 * manager.page_layout.page_bytes
    engine, _, _ = make_engine(RuntimeConfig(kv_memory_bytes=total, tokens_per_step=24, watermark=1.0), limits=LIMITS)
    engine.submit(ask("first", "small", length=30, max_tokens=20))
    engine.step()
    engine.submit(ask("large", "large", length=180, max_tokens=20))
    for i in range(30):
        engine.submit(ask(f"small{i}", "small", length=30, max_tokens=20))
    place = order_of_ends(drain(engine, 5000)).index("large")
    assert 1 <= place <= 2 * LIMITS.max_batch_size + 1


def test_decode_rows_share_a_step_that_is_too_small_for_all() -> None:
    engine, _, _ = make_engine(RuntimeConfig(kv_memory_bytes=1 << 22, tokens_per_step=2), limits=LIMITS)
    for i in range(4):
        engine.submit(ask(f"r{i}", "", length=1, max_tokens=40))
    counts = dict.fromkeys((f"r{i}" for i in range(4)), 0)
    for _ in range(60):
        for event in engine.step()[0]:
            if isinstance(event, TextEvent):
                counts[event.request_id] += 1
    assert max(counts.values()) - min(counts.values()) <= 2, counts


def test_a_prompt_beside_decode_rows_keeps_the_next_token_within_the_bound() -> None:
    """On a machine that takes 5 ms a step and 1 ms a token, with 30 ms allowed."""
    now_ns = [0]
    bound = RuntimeConfig(kv_memory_bytes=1 << 22, tokens_per_step=200, max_step_ms=30.0)
    engine, executor, _ = make_engine(bound, limits=LIMITS, clock_ns=lambda: now_ns[0])
    run, sizes = executor.run, []

    def timed(plan: StepPlan) -> StepResult:
        now_ns[0] += (5 + plan.num_tokens) * MS
        sizes.append(plan.num_tokens)
        return run(plan)

    executor.run = timed  # type: ignore[method-assign]
    engine.submit(ask("talks", "", length=4, max_tokens=400))
    for _ in range(10):
        engine.step()
    sizes.clear()
    engine.submit(ask("reads", "", length=500, max_tokens=0))
    events: list[Event] = []
    while not any(isinstance(event, FinishEvent) for event in events):
        events += engine.step()[0]
    assert isinstance(last_of(events, "reads"), FinishEvent)
    late = [size for size in sizes if 5 + size > 30]
    assert len(late) <= 1, f"only the first guess may be late: {sizes}"
    assert len(sizes) < 500 / 20 + 5, "and the time allowed is used"
