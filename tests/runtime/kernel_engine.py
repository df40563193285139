"""A tiny model that kernels fit, as a whole engine without files, and conversations that make it commit and probe.

Needs torch only, so that it also runs on a bare machine with a GPU (tests/gpu/checks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from simulated_engine import CharTokenizer, PlainChat

from builder.lower_torch import TorchDecoder
from builder.model import HEAD, weight_recipes
from runtime.config import DType, EngineLimits, ModelSpec, RopeSpec, RuntimeConfig
from runtime.engine import Engine
from runtime.engine_parts import EngineParts
from runtime.intake import Intake
from runtime.kv_manager import KvManager
from runtime.kv_storage import ArenaPlace, KvStorage
from runtime.policy.base import Policy, Protection, Schedule
from runtime.request import ErrorEvent, Request, SamplingParams, TextEvent
from runtime.step import Executor

END_TOKEN = 0
SPEC = ModelSpec("qwen3", 2, 64, 96, 4, 2, 64, 97, 1e-5, RopeSpec(10000.0), 4096, False, qkv_bias=True, qk_norm=True,
                 eos_token_ids=(END_TOKEN,))  # fmt: skip
# Small enough that a few turns stage, probe, commit, dissolve and absorb. The second has another block format, the
# third adds squares of weights up.
SCHEDULE = Schedule(min_tokens=40, recent_tokens=16, span_tokens=32, every_steps=4)
POLICIES = {
    name: Policy(name, budget_ratio=0.5, block_format=block_format, floor_entries=4, schedule=SCHEDULE,
                 protection=Protection(system_prompt=False), score=score)
    for name, block_format, score in (
        ("tiny-k8v4", "k8v4", "both"), ("tiny-int8", "int8", "both"), ("tiny-norm", "k8v4", "norm"),
    )
}  # fmt: skip
CONFIG = RuntimeConfig(kv_memory_bytes=4 << 20, tokens_per_step=64, probe_tokens_per_step=32, num_threads=1)
TURNS = ("The tide comes in at nine. Remember it.", "Which colour was the boat?", "And when does the tide come in?")


def make_limits(dtype: DType) -> EngineLimits:
    return EngineLimits(dtype=dtype, kv_dtype=dtype, page_tokens=16, block_entries=64, policy="tiny-k8v4")


@dataclass(frozen=True, eq=False)
class Model:
    """What an executor is made of."""

    decoder: TorchDecoder
    limits: EngineLimits
    storage: KvStorage


def make_engine(
    make_executor: Callable[[Model], Executor], dtype: DType, place: ArenaPlace
) -> tuple[Engine, KvManager]:
    """The policies above must be registered. place: of the arenas and the weights."""
    limits = make_limits(dtype)
    manager = KvManager(SPEC, limits, CONFIG.kv_memory_bytes)
    gen = torch.Generator().manual_seed(5)
    weights = {r.name: torch.randn(r.shape, generator=gen) * 0.2 + 1.5 * r.is_norm for r in weight_recipes(SPEC)}
    weights[HEAD][END_TOKEN] = 0.0  # never the best of 97
    decoder = TorchDecoder(SPEC, weights, dtype, str(place.device))
    storage = KvStorage(SPEC, limits, manager.num_pages, manager.num_blocks, place)
    executor = make_executor(Model(decoder, limits, storage))
    intake = Intake(CharTokenizer(), PlainChat(), limits.policy, limits.max_seq_len)  # type: ignore[arg-type]
    return Engine(EngineParts(SPEC, limits, CONFIG, manager, executor, intake, probe_prompt=(5, 6, 7))), manager


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
