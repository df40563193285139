"""On a real model: once it was computed anew, a conversation is as if it had been compressed once, at its end."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.policy import registry
from runtime.policy.base import Schedule
from runtime.request import KvStats, Request, SamplingParams
from runtime.step import ProbePlan
from runtime.wiring import load_parts

TEXTS = [f"Turn {i}: " + f"the quick brown fox {i} jumps over the lazy dog number {i + 7}. " * 6 for i in range(5)]
SCHEDULE = Schedule(min_tokens=200, recent_tokens=32)


def hold(engine_dir: Path, policy: str) -> tuple[KvStats, int, torch.Tensor]:
    """Bytes and counts, commits, and what the model would say next."""
    parts = load_parts(engine_dir, RuntimeConfig(kv_memory_bytes=64 << 20, num_threads=1))
    engine = Engine(parts)
    for i, text in enumerate(TEXTS):
        engine.submit(Request(f"t{i}", text, SamplingParams(max_tokens=0), "c", policy=policy))
        while engine.step()[1]:
            pass

    def read(plan: ProbePlan) -> torch.Tensor:
        logits: torch.Tensor = parts.executor.logits(plan)  # type: ignore[attr-defined]
        return logits

    logits = engine.peek("c", "And the dog?", "", read)
    return engine.kv_stats("c"), engine.stats().commits, torch.log_softmax(logits, dim=-1)


def test_it_is_as_if_it_had_been_compressed_once(tiny_engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commitkv = registry.ALL_POLICIES["commitkv"]
    schedules = {
        "renewed": dataclasses.replace(SCHEDULE, reread_growth=1.1, renew=True),
        "reread": dataclasses.replace(SCHEDULE, reread_growth=1.1),
        "once": dataclasses.replace(SCHEDULE, min_tokens=10**6),
    }
    for name, schedule in schedules.items():
        policy = dataclasses.replace(commitkv, name=name, schedule=schedule)
        monkeypatch.setitem(registry.ALL_POLICIES, name, policy)
    num_tokens = hold(tiny_engine_dir, "once")[0].active
    late = dataclasses.replace(SCHEDULE, min_tokens=num_tokens)  # everything is staged after the last turn
    monkeypatch.setitem(registry.ALL_POLICIES, "once", dataclasses.replace(commitkv, name="once", schedule=late))

    once, once_commits, said_once = hold(tiny_engine_dir, "once")
    renewed, commits, said = hold(tiny_engine_dir, "renewed")
    said_reread = hold(tiny_engine_dir, "reread")[2]
    assert once_commits == 1 < commits
    assert dataclasses.replace(renewed, peak_kv_bytes=0) == dataclasses.replace(once, peak_kv_bytes=0)
    assert renewed.evicted > 0 and renewed.peak_kv_bytes < once.peak_kv_bytes
    torch.testing.assert_close(said, said_once, rtol=0.0, atol=2e-3)
    assert (said_reread - said_once).abs().max() > 5 * (said - said_once).abs().max(), (
        "what was dropped makes a difference"
    )
