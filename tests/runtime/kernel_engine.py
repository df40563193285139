"""A tiny engine that kernels fit, and conversations that make it commit and probe."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tiny_engine import save_tiny_model

from builder.build import main as build
from runtime.config import RuntimeConfig
from runtime.engine import Engine, EngineParts
from runtime.kv_storage import ArenaPlace, KvStorage
from runtime.policy.base import Policy, Protection, Schedule
from runtime.request import ErrorEvent, Request, SamplingParams, TextEvent
from runtime.step import Executor

HEAD_DIM = 64
# Small enough that a few turns stage, probe, commit, dissolve and absorb; the second has another block format.
SCHEDULE = Schedule(min_tokens=40, recent_tokens=16, span_tokens=32, every_steps=4)
POLICIES = {
    policy.name: policy
    for policy in (
        Policy("tiny-k8v4", budget_ratio=0.5, block_format="k8v4", floor_entries=4, schedule=SCHEDULE,
               protection=Protection(system_prompt=False)),
        Policy("tiny-int8", budget_ratio=0.5, block_format="int8", floor_entries=4, schedule=SCHEDULE,
               protection=Protection(system_prompt=False)),
    )
}  # fmt: skip
CONFIG = RuntimeConfig(kv_memory_bytes=4 << 20, tokens_per_step=64, probe_tokens_per_step=32, num_threads=1)
TURNS = ("The tide comes in at nine. Remember it.", "Which colour was the boat?", "And when does the tide come in?")


def build_kernel_engine(directory: Path, dtype: str, policy: str) -> Path:
    """Llama of 2 layers, 4 query and 2 KV heads of 64. `policy` must be registered."""
    model, output = directory / "model", directory / "engine"
    model.mkdir()
    save_tiny_model(model, head_dim=HEAD_DIM)
    arguments = ["--model", str(model), "--output", str(output), "--dtype", dtype, "--policy", policy]
    assert build([*arguments, "--block-entries", "32"]) == 0
    return output


def make_storage(parts: EngineParts, place: ArenaPlace) -> KvStorage:
    """What the wiring makes, poisoned or elsewhere."""
    return KvStorage(parts.spec, parts.limits, parts.manager.num_pages, parts.manager.num_blocks, place)


def engine_with(parts: EngineParts, executor: Executor) -> Engine:
    return Engine(dataclasses.replace(parts, executor=executor))


def talk(engine: Engine, policies: tuple[str, ...], max_tokens: int = 12) -> list[str]:
    """A conversation of several turns under each policy, all at once, idle work in between; the answers in order."""
    answers = []
    for number, text in enumerate(TURNS):
        for policy in policies:
            sampling = SamplingParams(max_tokens=max_tokens)
            engine.submit(Request(f"{policy}-{number}", text, sampling, policy, policy=policy))
        said = {f"{policy}-{number}": "" for policy in policies}
        busy = True
        while busy:
            events, busy = engine.step()
            for event in events:
                assert not isinstance(event, ErrorEvent), event
                if isinstance(event, TextEvent):
                    said[event.request_id] += event.text
        answers += said.values()
    return answers
