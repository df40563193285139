"""The engine loop over an executor that checks every plan."""

import dataclasses

import pytest
from simulated_engine import EAGER, SPEC, CharTokenizer, drain, last_of, make_engine, policies_for_tests, text_of

import runtime.policy.registry as registry
from runtime.config import RuntimeConfig
from runtime.errors import (
    ConversationBusyError,
    OutOfMemoryError,
    PromptTooLongError,
    RequestError,
    TurnTooLargeError,
    UnknownConversationError,
    UnknownPolicyError,
)
from runtime.request import ErrorEvent, FinishEvent, Request, SamplingParams

CONFIG = RuntimeConfig(kv_memory_bytes=1 << 20, tokens_per_step=24, probe_tokens_per_step=16)


@pytest.fixture(autouse=True)
def small_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, policy in policies_for_tests().items():
        monkeypatch.setitem(registry.ALL_POLICIES, name, policy)


def ask(
    request_id: str, text: str, conversation_id: str | None = None, max_tokens: int = 10, **more: object
) -> Request:
    return Request(request_id, text, SamplingParams(max_tokens=max_tokens), conversation_id, **more)  # type: ignore[arg-type]


def run_conversation(policy: str, config: RuntimeConfig = CONFIG, lossless: bool = False) -> tuple[list[str], object]:
    engine, _, manager = make_engine(config, policy=policy, lossless=lossless)
    texts = []
    for i in range(8):
        engine.submit(ask(f"r{i}", f"turn number {i} says something of its own", "c", 12))
        events = drain(engine)
        manager.check_invariants()
        end = last_of(events, f"r{i}")
        assert isinstance(end, FinishEvent)
        texts.append(text_of(events, f"r{i}"))
    return texts, engine


def test_only_the_new_turn_is_prefilled() -> None:
    engine, _, _ = make_engine(CONFIG)
    engine.submit(ask("a", "hello there, this is long", "c"))
    first = last_of(drain(engine), "a")
    engine.submit(ask("b", "more", "c"))
    second = last_of(drain(engine), "b")
    assert isinstance(first, FinishEvent) and isinstance(second, FinishEvent)
    assert second.stats.prompt_tokens == len("<more>")
    # All but the last generated token of the first turn is in the cache.
    assert second.stats.reused_tokens == first.stats.prompt_tokens + first.stats.generated_tokens - 1


def test_chunks_batches_and_lossless_commits_leave_the_text_alone() -> None:
    expected, _ = run_conversation("full")
    small_steps = RuntimeConfig(kv_memory_bytes=1 << 20, tokens_per_step=5)
    assert run_conversation("full", small_steps)[0] == expected
    texts, engine = run_conversation("commitkv", lossless=True)
    assert texts == expected
    assert engine.stats().commits > 0 and engine.stats().probes > 0  # type: ignore[attr-defined]


def test_compression_shrinks_memory() -> None:
    _, full = run_conversation("full")
    _, small = run_conversation("commitkv")
    assert small.kv_stats("c").kv_bytes < full.kv_stats("c").kv_bytes  # type: ignore[attr-defined]
    stats = small.kv_stats("c")  # type: ignore[attr-defined]
    assert stats.committed > 0 and stats.evicted > 0
    assert small.stats().idle  # type: ignore[attr-defined]


def test_protected_tokens_stay_in_pages() -> None:
    engine, _executor, manager = make_engine(CONFIG, policy="commitkv")
    text = "x" * 60 + "PASSWORD" + "y" * 60
    engine.submit(ask("a", text, "c", 30, system_prompt="be kind", protect=((60, 68),)))
    drain(engine)
    for i in range(4):
        engine.submit(ask(f"b{i}", "z" * 40, "c", 10))
        drain(engine)
    kv = manager[0]
    in_pages = {p for page in kv.pages for p in page.positions}
    first = len("[be kind]") + 1 + 60
    assert set(range(first, first + 8)) <= in_pages
    assert set(range(len("[be kind]"))) <= in_pages
    assert first - 5 not in in_pages, "its neighbours were committed"


def test_cancel_undoes_the_turn() -> None:
    engine, _, manager = make_engine(CONFIG)
    engine.submit(ask("a", "hello", "c"))
    drain(engine)
    before = engine.kv_stats("c")
    engine.submit(ask("b", "something longer that is cut off", "c", 100))
    for _ in range(9):
        engine.step()
    engine.cancel("b")
    end = last_of(drain(engine), "b")
    assert isinstance(end, FinishEvent) and end.reason == "cancelled"
    after = engine.kv_stats("c")
    # The first turn's last token was read by the cancelled one; it stays.
    assert after.active == before.active + 1
    manager.check_invariants()
    engine.submit(ask("c", "and on", "c"))
    assert isinstance(last_of(drain(engine), "c"), FinishEvent)


def test_cancel_before_it_ran_and_raw_prompts_leave_nothing() -> None:
    engine, _, manager = make_engine(CONFIG)
    engine.submit(ask("a", "raw prompt"))
    engine.cancel("a")
    assert last_of(drain(engine), "a").reason == "cancelled"  # type: ignore[union-attr]
    engine.submit(ask("b", "raw prompt"))
    drain(engine)
    assert manager.budget.used_bytes == 0


def test_end_conversation_frees_all_and_unknown_ones_are_named() -> None:
    engine, _, manager = make_engine(CONFIG)
    engine.submit(ask("a", "hello", "c", 40))
    engine.step()
    engine.end_conversation("c")  # while it runs: the turn finishes first
    events = drain(engine)
    assert last_of(events, "a").reason == "length"  # type: ignore[union-attr]
    assert manager.budget.used_bytes == 0
    with pytest.raises(UnknownConversationError, match="'c'"):
        engine.end_conversation("c")


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_least_max_tokens(max_tokens: int) -> None:
    engine, _, _ = make_engine(CONFIG)
    engine.submit(ask("a", "hello", None, max_tokens))
    events = drain(engine)
    end = last_of(events, "a")
    assert isinstance(end, FinishEvent) and end.reason == "length"
    assert end.stats.generated_tokens == max_tokens == len(text_of(events, "a"))


def test_prompt_as_long_as_the_limit() -> None:
    engine, _, _ = make_engine(CONFIG)
    engine.submit(ask("fits", "x" * 599, None, 10))
    end = last_of(drain(engine), "fits")
    assert isinstance(end, FinishEvent) and (end.reason, end.stats.generated_tokens) == ("length", 1)
    with pytest.raises(PromptTooLongError, match="600 tokens"):
        engine.submit(ask("too long", "x" * 600))
    assert not engine.has_turns()


def test_megabytes_of_text_are_refused_before_they_are_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, _ = make_engine(CONFIG)
    monkeypatch.setattr(CharTokenizer, "encode", lambda *_: pytest.fail("tokenized"))
    for text, system in (("x" * 2401, None), ("x", "y" * 2400)):
        with pytest.raises(PromptTooLongError, match=r"2,401 characters .* at most 2,400"):
            engine.submit(ask("a", text, "c", system_prompt=system))
    assert engine.stats().conversations == 0


def test_requests_that_cannot_run_are_refused_and_change_nothing() -> None:
    engine, _, manager = make_engine(CONFIG)
    engine.submit(ask("a", "hello", "c"))
    for error, request in (
        (RequestError, ask("a", "same id")),
        (ConversationBusyError, ask("b", "second turn", "c")),
        (UnknownPolicyError, ask("d", "x", policy="magic")),
        (RequestError, ask("e", "")),
        (RequestError, ask("f", "short", protect=((2, 9),))),
    ):
        with pytest.raises(error):
            engine.submit(request)
    drain(engine)
    with pytest.raises(RequestError, match="begun with 'full'"):
        engine.submit(ask("g", "x", "c", policy="commitkv"))
    with pytest.raises(RequestError, match="first turn"):
        engine.submit(ask("h", "x", "c", system_prompt="late"))
    assert isinstance(last_of([*drain(engine), *_again(engine)], "i"), FinishEvent)
    manager.check_invariants()


def _again(engine: object) -> list[object]:
    engine.submit(ask("i", "still alive", "c"))  # type: ignore[attr-defined]
    return drain(engine)  # type: ignore[arg-type, return-value]


def test_sampling_values_are_checked_by_name() -> None:
    for field, value in (
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("top_k", -2),
        ("max_tokens", -1),
        ("temperature", float("nan")),
    ):
        with pytest.raises(RequestError, match=field):
            SamplingParams(**{field: value})  # type: ignore[arg-type]


def memory_for(num_pages: int) -> RuntimeConfig:
    _, _, manager = make_engine(CONFIG)
    total = manager.budget.headroom_bytes + num_pages * manager.page_layout.page_bytes
    return RuntimeConfig(kv_memory_bytes=total, tokens_per_step=24, watermark=1.0)


def test_when_pages_run_out_turns_wait_and_all_finish_with_the_same_text() -> None:
    roomy, _, _ = make_engine(CONFIG)
    tight, _, manager = make_engine(memory_for(10))
    for engine in (roomy, tight):
        for i in range(6):
            engine.submit(ask(f"r{i}", f"prompt {i} " * 3, None, 30))
    expected, got = drain(roomy), drain(tight)
    for i in range(6):
        assert text_of(got, f"r{i}") == text_of(expected, f"r{i}")
    assert manager.budget.used_bytes == 0


def test_a_turn_that_fits_nowhere_is_refused_with_the_reason() -> None:
    engine, _, manager = make_engine(memory_for(10))
    with pytest.raises(TurnTooLargeError, match=r"202 tokens .* max_tokens 10 .* raise kv_memory_bytes"):
        engine.submit(ask("a", "x" * 200, "c"))
    assert engine.stats().conversations == 0 and manager.budget.used_bytes == 0


def test_idle_conversations_give_up_their_cache_and_come_back() -> None:
    engine, _, _ = make_engine(memory_for(12))
    roomy, _, _ = make_engine(CONFIG)
    texts = []
    for each in (engine, roomy):
        seen = []
        for i in range(3):
            for name in "abc":
                each.submit(ask(f"{name}{i}", f"{name} says {i} " * 2, name, 8))
                seen.append(text_of(drain(each), f"{name}{i}"))
        texts.append(seen)
    assert texts[0] == texts[1]


def test_a_step_that_fails_rolls_back_its_turns() -> None:
    engine, executor, manager = make_engine(CONFIG)
    engine.submit(ask("a", "hello", "c"))
    drain(engine)
    engine.submit(ask("b", "again", "c"))
    executor.fail_next = True
    with pytest.raises(RuntimeError):
        engine.step()
    events = engine.abort(RuntimeError("broken"))
    assert isinstance(last_of(events, "b"), ErrorEvent)
    manager.check_invariants()
    engine.submit(ask("c", "again", "c"))
    assert isinstance(last_of(drain(engine), "c"), FinishEvent)


def test_a_probe_gives_way_to_a_new_turn() -> None:
    engine, executor, _ = make_engine(CONFIG, policy="commitkv")
    engine.submit(ask("a", "hello " * 6, "c", 5))
    while engine.has_turns():
        engine.step()
    run_probe = executor.probe

    def probe_with_arrival(plan: object, interrupted: object) -> bool:
        engine.submit(ask("b", "quick", None, 1))
        return run_probe(plan, interrupted)  # type: ignore[arg-type]

    executor.probe = probe_with_arrival  # type: ignore[method-assign, assignment]
    engine.step()
    executor.probe = run_probe  # type: ignore[method-assign]
    assert engine.stats().probes_interrupted == 1
    events, _ = engine.step()
    assert isinstance(last_of(events, "b"), FinishEvent), "the new turn runs in the very next step"
    drain(engine)
    assert engine.stats().commits == 1, "the span was probed and committed later"


def test_the_recent_window_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, executor, _ = make_engine(CONFIG, policy="commitkv")
    run, probe, skips = executor.run, executor.probe, []
    monkeypatch.setattr(executor, "run", lambda plan: skips.extend(s.record_skip for s in plan.sequences) or run(plan))
    monkeypatch.setattr(executor, "probe", lambda plan, stop: skips.append(plan.record_skip) or probe(plan, stop))
    engine.submit(ask("a", "hello " * 20, "c", 5))
    drain(engine)
    assert engine.stats().probes > 0
    assert set(skips) == {EAGER.recent_tokens}


def test_many_conversations_make_room_by_ending_the_oldest() -> None:
    engine, _, manager = make_engine(RuntimeConfig(kv_memory_bytes=1 << 20, max_conversations=3))
    for i in range(5):
        engine.submit(ask(f"r{i}", "hi", f"c{i}", 2))
        drain(engine)
    with pytest.raises(UnknownConversationError):
        engine.kv_stats("c1")
    assert engine.kv_stats("c2").active > 0
    manager.check_invariants()


def test_queue_limit() -> None:
    engine, _, _ = make_engine(RuntimeConfig(kv_memory_bytes=1 << 20, max_waiting=2))
    engine.submit(ask("a", "x"))
    engine.submit(ask("b", "x"))
    with pytest.raises(OutOfMemoryError, match="queue"):
        engine.submit(ask("c", "x"))
    drain(engine)


def test_stats_name_the_full_cache_in_fp16() -> None:
    engine, _, _ = make_engine(CONFIG)
    engine.submit(ask("a", "hello", "c", 4))
    end = last_of(drain(engine), "a")
    assert isinstance(end, FinishEvent)
    tokens = len("<hello>") + 3
    assert end.stats.kv.kv_full_bytes == tokens * SPEC.kv_token_bytes("fp16")


def test_a_busy_engine_still_probes_before_it_commits() -> None:
    engine, _, _ = make_engine(CONFIG, policy="commitkv")
    engine.submit(ask("long", "keeps the engine busy", None, 200))
    engine.submit(ask("a", "hello " * 8, "c", 2))
    probes_at_commit = None
    while engine.has_turns():
        engine.step()
        stats = engine.stats()
        if stats.commits and probes_at_commit is None:
            probes_at_commit = stats.probes
            assert stats.running, "the commit did not wait for idle time"
    assert probes_at_commit is not None and probes_at_commit > 1
    assert engine.stats().probes_interrupted == 0


def test_a_busy_engine_does_not_wait_for_probes_where_steps_have_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    both = dataclasses.replace(registry.ALL_POLICIES["commitkv"], name="both", score="both")
    monkeypatch.setitem(registry.ALL_POLICIES, "both", both)
    engine, _, _ = make_engine(CONFIG, policy="both")
    engine.submit(ask("long", "keeps the engine busy", None, 100))
    engine.submit(ask("a", "hello " * 40, "c", 2))
    while not engine.stats().commits:
        assert engine.has_turns()
        engine.step()
    assert engine.stats().running and engine.stats().probes == 0
