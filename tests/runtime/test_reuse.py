"""The tiny engine says the same with reuse on and off: shared prompts, chunked prefill and quantized caches."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.policy import registry
from runtime.request import Event, FinishEvent, Message, Request, SamplingParams, TextEvent, TurnStats
from runtime.wiring import load_engine

# 260 tokens with what the template puts around it: 16 whole pages and a rest.
SYSTEM = ("You look after machines. " * 10)[:250]
SHARED = 256


@pytest.fixture(params=["full", "quantize-int8", "commitkv"])
def policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A policy that commits conversations of a few hundred tokens: INT8 blocks, or INT8 keys with INT4 values."""
    name = str(request.param)
    known = registry.ALL_POLICIES[name]
    if known.compresses:
        schedule = dataclasses.replace(known.schedule, min_tokens=300, recent_tokens=48)
        monkeypatch.setitem(registry.ALL_POLICIES, name, dataclasses.replace(known, schedule=schedule))
    return name


def load(engine_dir: Path, tokens_per_step: int) -> Engine:
    config = RuntimeConfig(kv_memory_bytes=64 << 20, num_threads=1, tokens_per_step=tokens_per_step)
    return load_engine(engine_dir, config, verify=False)


def run(engine: Engine, request: Request) -> tuple[str, TurnStats]:
    """Runs a turn and all idle work after it."""
    engine.submit(request)
    events: list[Event] = []
    worked = True
    while worked:
        new, worked = engine.step()
        events += new
    ends = [event for event in events if isinstance(event, FinishEvent)]
    assert len(ends) == 1 and ends[0].reason == "length"
    return "".join(event.text for event in events if isinstance(event, TextEvent)), ends[0].stats


def ask(name: str, turn: int, policy: str) -> Request:
    text = f"{name} {turn}: " + f"the pump of hall {turn} runs at {turn}00 bar, {name} says. " * 3
    return Request(
        f"{name}{turn}", text, SamplingParams(max_tokens=12), name, SYSTEM if turn == 0 else None, policy=policy
    )


@pytest.mark.parametrize("tokens_per_step", [32, 256])
def test_a_shared_prompt_changes_no_answer(tiny_engine_dir: Path, policy: str, tokens_per_step: int) -> None:
    alone, shared = (load(tiny_engine_dir, tokens_per_step) for _ in range(2))
    expected = [run(alone, ask("b", turn, policy)) for turn in range(4)]
    run(shared, ask("a", 0, "full"))
    got = [run(shared, ask("b", turn, policy)) for turn in range(4)]
    assert [text for text, _ in got] == [text for text, _ in expected]
    assert expected[0][1].reused_tokens == 0 and got[0][1].reused_tokens == SHARED
    assert got[0][1].kv.shared_kv_bytes > 0
    assert got[3][1].kv.kv_bytes < expected[3][1].kv.kv_bytes, "the prompt counts for the other conversation"
    assert (shared.stats().commits > 0) == (policy != "full")
    assert shared.stats().kv.used_bytes < 2 * alone.stats().kv.used_bytes


def test_whole_chats_say_what_turns_say(tiny_engine_dir: Path, policy: str) -> None:
    turns, chats = (load(tiny_engine_dir, 64) for _ in range(2))
    messages: tuple[Message, ...] = (Message("system", SYSTEM),)
    for turn in range(4):
        request = ask("c", turn, policy)
        expected, by_turn = run(turns, request)
        messages += (Message("user", request.text),)
        sampling = SamplingParams(max_tokens=12)
        answer, by_chat = run(chats, Request(f"m{turn}", "", sampling, policy=policy, messages=messages))
        messages += (Message("assistant", answer),)
        assert answer == expected
        assert (by_chat.prompt_tokens, by_chat.reused_tokens) == (by_turn.prompt_tokens, by_turn.reused_tokens)
        assert by_chat.recomputed_tokens == 0
    assert chats.stats().conversations == 1


def test_an_edit_before_a_commit_is_computed_again_exactly(tiny_engine_dir: Path, policy: str) -> None:
    engine, fresh = (load(tiny_engine_dir, 64) for _ in range(2))
    messages: tuple[Message, ...] = ()
    for turn in range(4):
        messages += (Message("user", ask("d", turn, policy).text),)
        request = Request(f"m{turn}", "", SamplingParams(max_tokens=12), "d", policy=policy, messages=messages)
        messages += (Message("assistant", run(engine, request)[0]),)
    edited = (Message("user", "Something else came first."), *messages[1:], Message("user", "And now?"))
    request = Request("edited", "", SamplingParams(max_tokens=12), "d", policy=policy, messages=edited)
    answer, stats = run(engine, request)
    assert answer == run(fresh, request)[0]
    assert stats.recomputed_reason == f"history edited at message 1, {stats.recomputed_tokens} tokens recomputed"
    start = len("Suser\n") if policy == "full" else 0
    assert stats.reused_tokens == start, "entries of a commit depend on what came before and after them"
