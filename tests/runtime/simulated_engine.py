"""An engine over the simulated executor, with a tokenizer of one token per character."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

from simulated_executor import SimulatedExecutor

from runtime.bad_words import TokenTexts
from runtime.commit_worker import Task
from runtime.config import EngineLimits, ModelSpec, RopeSpec, RuntimeConfig
from runtime.engine import Engine
from runtime.engine_parts import EngineParts
from runtime.intake import Intake
from runtime.kv_manager import KvManager
from runtime.kv_state import twin_of
from runtime.policy.base import Policy, Schedule
from runtime.policy.registry import ALL_POLICIES
from runtime.request import ErrorEvent, Event, FinishEvent, TextEvent

SPEC = ModelSpec(
    family="llama",
    num_layers=2,
    hidden_size=16,
    ffn_size=16,
    num_q_heads=2,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=97,
    rms_eps=1e-5,
    rope=RopeSpec(10000.0),
    max_positions=4096,
    tied_embeddings=True,
    eos_token_ids=(0,),
)
LIMITS = EngineLimits(page_tokens=8, block_entries=16, max_seq_len=600, max_batch_size=4)
EAGER = Schedule(min_tokens=40, recent_tokens=12, span_tokens=24, every_steps=4)


@dataclass(frozen=True)
class CharTokenizer:
    """Token id = 1 + code % 96; never the end token 0."""

    max_token_chars: int = 4

    def encode(self, text: str, literal: tuple[int, int] | None = None) -> tuple[list[int], list[tuple[int, int]]]:
        return [1 + ord(c) % 96 for c in text], [(i, i + 1) for i in range(len(text))]

    def stream(self) -> CharStream:
        return CharStream()

    def token_texts(self) -> TokenTexts:
        return TokenTexts([b"", *(chr(32 + token_id).encode() for token_id in range(1, 97))])


class CharStream:
    def step(self, token_id: int) -> str | None:
        return chr(32 + token_id)


@dataclass(frozen=True)
class Rendered:
    text: str
    system_end: int
    user_start: int
    user_end: int


class PlainChat:
    """'[system]' then '<user>' per turn."""

    def first_turn(self, system: str | None, user: str) -> Rendered:
        head = f"[{system}]" if system else ""
        return Rendered(f"{head}<{user}>", len(head), len(head) + 1, len(head) + 1 + len(user))

    def next_turn(self, user: str, previous_ended: bool) -> Rendered:
        return Rendered(f"<{user}>", 0, 1, 1 + len(user))

    def answer(self, text: str) -> str:
        return text

    def plain(self, role: str, text: str) -> str:
        return text


class SlowTask:
    """Done once somebody waits for it; until then it says so only after being looked at `looks` times."""

    def __init__(self, job: Callable[[], object], told: Callable[[], None], looks: int) -> None:
        self._job, self._told, self._looks = job, told, looks
        self._task: Task[object] | None = None

    def done(self) -> bool:
        self._looks -= 1
        self._told()  # an engine without other work does not wait for a thread that is not there
        return self._looks < 0

    def result(self) -> object:
        self._task = self._task or Task(self._job)
        return self._task.result()


@dataclass
class SlowWorker:
    """A `CommitWorker` without a thread: nothing is done before somebody waits for it, or looks often enough."""

    looks: int
    cpu_ns: int = 0

    def run(self, job: Callable[[], object], told: Callable[[], None]) -> SlowTask:
        self.cpu_ns += 1
        return SlowTask(job, told, self.looks)

    def close(self) -> None:
        pass


def eager(policy: Policy, **changes: object) -> Policy:
    own = policy.schedule
    schedule = dataclasses.replace(EAGER, reread_growth=own.reread_growth, renew=own.renew)
    return dataclasses.replace(policy, schedule=schedule, floor_entries=2, **changes)  # type: ignore[arg-type]


def make_engine(
    config: RuntimeConfig,
    *,
    policy: str = "full",
    lossless: bool = False,
    limits: EngineLimits = LIMITS,
    clock_ns: Callable[[], int] = time.monotonic_ns,
    worker: SlowWorker | None = None,
) -> tuple[Engine, SimulatedExecutor, KvManager]:
    manager = KvManager(SPEC, limits, config.kv_memory_bytes)
    executor = SimulatedExecutor(limits.page_tokens, limits.block_entries, SPEC.num_kv_rows, lossless=lossless)
    intake = Intake(CharTokenizer(), PlainChat(), policy, limits.max_seq_len)  # type: ignore[arg-type]
    parts = EngineParts(SPEC, limits, config, manager, executor, intake, probe_prompt=(5, 6, 7), commit_worker=worker)  # type: ignore[arg-type]
    engine = Engine(parts, clock_ns)
    executor.text_of = lambda handle: engine._table.by_handle[max(handle, twin_of(handle))].tokens
    return engine, executor, manager


def drain(engine: Engine, max_steps: int = 1500) -> list[Event]:
    events: list[Event] = []
    for _ in range(max_steps):
        new, worked = engine.step()
        events += new
        if not worked:
            return events
    raise AssertionError("the engine never came to rest")


def text_of(events: list[Event], request_id: str) -> str:
    return "".join(e.text for e in events if isinstance(e, TextEvent) and e.request_id == request_id)


def last_of(events: list[Event], request_id: str) -> FinishEvent | ErrorEvent:
    ends = [e for e in events if e.request_id == request_id and not isinstance(e, TextEvent)]
    assert len(ends) == 1, ends
    return ends[0]


def policies_for_tests() -> dict[str, Policy]:
    """The registered policies with limits small enough to see them work on 600 tokens, and one with exact entries."""
    exact = dataclasses.replace(ALL_POLICIES["commitkv"], name="exact", exact_entries=11)
    policies = {**ALL_POLICIES, "exact": exact}
    return {name: eager(policy) if policy.compresses else policy for name, policy in policies.items()}
