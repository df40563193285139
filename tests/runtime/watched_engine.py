"""An engine of the simulated executor whose probes are noted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from simulated_engine import EAGER, make_engine

import runtime.policy.registry as registry
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.kv_manager import KvManager
from runtime.kv_state import ConversationKv
from runtime.policy.base import Policy
from runtime.request import Request, SamplingParams
from runtime.step import ProbePlan

CONFIG = RuntimeConfig(kv_memory_bytes=1 << 20, tokens_per_step=24, probe_tokens_per_step=16)
PROMPT = 3  # tokens of the simulated engine's request to repeat


@dataclass
class Watched:
    """An engine whose probes are noted; `interrupt` makes the next one give way."""

    engine: Engine
    manager: KvManager
    plans: list[ProbePlan] = field(default_factory=list)
    done: list[ProbePlan] = field(default_factory=list)
    interrupt: bool = False
    number: int = 0

    def turn(self, text: str) -> None:
        self.engine.submit(Request(f"r{self.number}", text, SamplingParams(max_tokens=1), "c"))
        self.number += 1

    @property
    def handle(self) -> int:
        return self.engine.conversation("c").handle

    @property
    def kv(self) -> ConversationKv:
        return self.manager[self.handle]


def watch(monkeypatch: pytest.MonkeyPatch, config: RuntimeConfig = CONFIG, *, renew: bool = False) -> Watched:
    schedule = dataclasses.replace(EAGER, reread_growth=1.5, renew=renew)
    policy = Policy(name="reread", score="probe", floor_entries=2, schedule=schedule)
    monkeypatch.setitem(registry.ALL_POLICIES, "reread", policy)
    engine, executor, manager = make_engine(config, policy="reread")
    found = Watched(engine, manager)
    probe = executor.probe

    def noted(plan: ProbePlan, interrupted: Callable[[], bool]) -> bool:
        found.plans.append(plan)
        if found.interrupt:
            found.interrupt = False
            return False
        if probe(plan, interrupted):
            found.done.append(plan)
            return True
        return False

    monkeypatch.setattr(executor, "probe", noted)
    return found
