"""Steps that are recorded give the bits of those that are not, in every family, with every policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import save_tiny_model

from builder.build import main as build
from builder.recorded_step import MAX_ROWS
from plugins.native_build import find_compiler
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.policy import registry
from runtime.request import Request, SamplingParams
from runtime.wiring import load_engine

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="native forms need a C++ compiler")

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(tmp_path: Path) -> MakeEngine:
    """An engine of a tiny model in bf16, built once per kind."""

    def make(family: str = "llama", weights: str = "bf16", threads: int = 1) -> Engine:
        output = tmp_path / f"{family}-{weights}"
        if not output.exists():
            save_tiny_model(tmp_path / family, family)
            dtypes = ["--dtype", "bf16", *(["--weight-dtype", "int8"] if weights == "int8" else [])]
            assert build(["--model", str(tmp_path / family), "--output", str(output), *dtypes]) == 0
        # With a thread that writes commits, the order of steps would depend on its time.
        config = RuntimeConfig(kv_memory_bytes=64 << 20, num_threads=threads, background_commits=False)
        return load_engine(output, config, verify=False)

    return make


def decoder_of(engine: Engine) -> Any:
    return engine._executor._decoder  # type: ignore[attr-defined]


def hold(engine: Engine, policies: tuple[str, ...], *, record: bool, num_turns: int = 3) -> list[torch.Tensor]:
    """Logits of every step of conversations that speak at once."""
    decoder, seen = decoder_of(engine), []
    decoder._records &= record
    forward = decoder.forward

    def spy(*arguments: Any) -> Any:
        logits = forward(*arguments)
        seen.append(None if logits is None else logits.clone())
        return logits

    decoder.forward = spy
    for turn in range(num_turns):
        for i, policy in enumerate(policies):
            text = f"Turn {turn} of {i}: " + "the quick brown fox jumps over the lazy dog. " * (2 + i)
            engine.submit(Request(f"{turn}/{i}", text, SamplingParams(max_tokens=6 + 3 * i), str(i), policy=policy))
        busy = True
        while busy:
            _, busy = engine.step()
    return seen


def same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(got) == len(expected) > 10 and all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(got, expected, strict=True)
    )


@pytest.mark.parametrize("weights", ["bf16", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_same_bits(make_engine: MakeEngine, family: str, weights: str) -> None:
    plain, recorded = make_engine(family, weights), make_engine(family, weights)
    expected = hold(plain, ("full",), record=False)
    assert not decoder_of(plain)._recorded
    assert same(hold(recorded, ("full",), record=True), expected)
    assert set(decoder_of(recorded)._recorded) == {1}


def test_many_conversations_with_blocks_of_several_formats(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = ("full", "commitkv", "quantize-int4", "quantize-int8", "h2o", "streaming-llm")
    for name in policies:
        policy = registry.ALL_POLICIES[name]
        schedule = dataclasses.replace(policy.schedule, min_tokens=100, recent_tokens=32)
        monkeypatch.setitem(registry.ALL_POLICIES, name, dataclasses.replace(policy, schedule=schedule))
    plain, recorded = make_engine(threads=2), make_engine(threads=2)
    expected = hold(plain, policies, record=False)
    assert same(hold(recorded, policies, record=True), expected)
    assert max(decoder_of(recorded)._recorded) > 1
    plain_kv, recorded_kv = ([engine.kv_stats(str(i)) for i in range(len(policies))] for engine in (plain, recorded))
    assert plain_kv == recorded_kv and sum(stats.committed > 0 for stats in plain_kv) == len(policies) - 1


def test_watched_sequences_are_not_recorded(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = registry.ALL_POLICIES["commitkv"]
    signals = dataclasses.replace(policy.signals, attention=1.0, jump=1.0)
    schedule = dataclasses.replace(policy.schedule, min_tokens=100)
    monkeypatch.setitem(
        registry.ALL_POLICIES, "commitkv", dataclasses.replace(policy, signals=signals, schedule=schedule)
    )
    expected = hold(make_engine(), ("commitkv",), record=False)
    assert same(hold(make_engine(), ("commitkv",), record=True), expected)


def test_long_prompts_are_not_recorded(make_engine: MakeEngine) -> None:
    engine = make_engine()
    hold(engine, ("full",) * 3, record=True)
    assert max(decoder_of(engine)._recorded) <= MAX_ROWS


def test_forms_that_cannot_be_bound_are_called(tiny_engine_dir: Path) -> None:
    """Products with fp32 weights are torch's."""
    engine = load_engine(tiny_engine_dir, RuntimeConfig(kv_memory_bytes=64 << 20, num_threads=1), verify=False)
    assert len(hold(engine, ("full",), record=True)) > 10
    assert not decoder_of(engine)._recorded
