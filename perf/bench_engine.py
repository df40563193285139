"""Our engine as a system of `perf.bench`: one engine in this process, a conversation per policy that grows.

A batch is the grown conversation and copies of it, each in pages and blocks of its own, so that a decode step reads
as many bytes as it would for conversations that were held one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from perf import stepping
from perf.profile_step import filler
from runtime import manifest as manifests
from runtime.checkpoint_tables import place_of, reinstate, tables_of
from runtime.config import DTYPE_BYTES, RuntimeConfig
from runtime.engine import Engine
from runtime.executor_torch import TorchExecutor
from runtime.figures import EngineStats
from runtime.kv_transfer import KvTransfer
from runtime.memory_plan import weight_bytes
from runtime.request import KvStats, Request, SamplingParams
from runtime.wiring import load_parts, load_tokenizer

TURN_TOKENS = 1000
LEAST_TURN_TOKENS = 32
TEMPLATE_TOKENS = 12  # what a chat template puts around a message, about
SHORT_MESSAGE = "Go on."
TURN_PROMPT_TOKENS, TURN_ANSWER_TOKENS = 100, 40  # of a turn whose upkeep is measured


@dataclass(frozen=True)
class Decoded:
    """step_ms: wall time of each decode step.   manager_ms, busy_ms: of all of them, as the engine counts them."""

    step_ms: tuple[float, ...]
    manager_ms: float = 0.0
    busy_ms: float = 0.0


def run_steps(step: Callable[[], object], num_steps: int, budget_s: float) -> tuple[float, ...]:
    """Milliseconds of up to `num_steps` calls, at least two, as many as `budget_s` allows."""
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < num_steps and (len(times) < 2 or time.perf_counter() < end):
        begin = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - begin))
    return tuple(times)


class BenchText:
    """Text of the shipped conversations, and its tokens."""

    def __init__(self, engine_dir: Path, num_tokens: int) -> None:
        tokenizer = load_tokenizer(engine_dir, manifests.load(engine_dir, target="cpu", verify=False))
        self._text = filler(engine_dir, 2 * num_tokens)
        self.tokens, self._offsets = tokenizer.encode(self._text, (0, 0))

    def piece(self, start: int, num_tokens: int) -> str:
        """Text of about the tokens [start, start + num_tokens)."""
        return self._text[self._offsets[start][0] : self._offsets[start + num_tokens][0]]


class BenchEngine:
    """An engine whose conversations are measured. It reaches into the engine's parts, which nobody else should see."""

    def __init__(self, engine_dir: Path, config: RuntimeConfig, text: BenchText) -> None:
        """Raises CommitKVError."""
        parts = load_parts(engine_dir, config, verify=False)
        assert isinstance(parts.executor, TorchExecutor)
        self.spec, self.limits = parts.spec, parts.limits
        self.num_threads = torch.get_num_threads()
        self._transfer = KvTransfer(parts.executor._storage)
        self._text = text
        self._engine = Engine(parts)
        self._engine._eos = ()  # answers go on for as long as they are measured
        self._num_requests = 0

    @property
    def read_weight_bytes(self) -> int:
        """Weights that every step reads: all of them, less an embedding that is not the head as well."""
        limits = self.limits
        total = weight_bytes(self.spec, limits.dtype, limits.weight_dtype)
        if self.spec.tied_embeddings:
            return total
        element_bytes = 1 if limits.weight_dtype == "int8" else DTYPE_BYTES[limits.dtype]
        return total - self.spec.vocab_size * self.spec.hidden_size * element_bytes

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def kv(self, name: str) -> KvStats:
        return self._engine.kv_stats(name)

    def grow(self, name: str, policy: str, num_tokens: int) -> None:
        """Holds turns until the conversation has about `num_tokens` tokens; idle time comes after the last of them."""
        while (missing := num_tokens - self._num_tokens(name)) >= LEAST_TURN_TOKENS:
            have = self._num_tokens(name)
            piece = self._text.piece(have, min(missing, TURN_TOKENS) - TEMPLATE_TOKENS)
            self._submit(name, piece, 1, policy)
            while self._engine.has_turns():
                self.step()
        self.rest()

    def _num_tokens(self, name: str) -> int:
        conversation = self._engine._table.find("", name)
        return 0 if conversation is None else len(conversation.tokens)

    def clone(self, source_name: str, name: str) -> None:
        """A second conversation with the same history, in memory of its own."""
        engine, manager = self._engine, self._engine._manager
        source = engine.conversation(source_name)
        manager.open_commits.conclude(source.handle)
        twin = replace(source, handle=engine._table.take_handle(), conversation_id=name, tokens=list(source.tokens))
        engine._keeper.open(twin, time.monotonic_ns())
        before, after = manager[source.handle], manager[twin.handle]
        place = reinstate(manager, twin.handle, tables_of(before))
        self._transfer.copy_in(place, self._transfer.copy_out(place_of(before)))
        for start, end in before.protected_ranges():
            after.protect(start, end)
        engine._table.rest(twin, time.monotonic_ns())

    def end(self, name: str) -> None:
        self._engine.end_conversation(name)
        self.rest()

    def begin_turns(self, names: list[str], message: str) -> tuple[list[str], int, float]:
        """A turn in each conversation, run to its first token. Returns request ids, prompt tokens, seconds."""
        ids = [self._submit(name, message, self.limits.max_seq_len) for name in names]
        turns = [self._engine.conversation(name).turn for name in names]
        begin = time.perf_counter()
        while any(turn is not None and not turn.first_token_ns for turn in turns):
            self.step()
        seconds = time.perf_counter() - begin
        return ids, sum(turn.prompt_end - turn.first_token for turn in turns if turn is not None), seconds

    def choose(self, names: list[str]) -> None:
        """Of the turns that run, only those of these conversations take part in steps, until this is called again."""
        self._engine._scheduler.running = [self._engine.conversation(name) for name in names]

    def undo(self, ids: list[str]) -> None:
        """Takes turns back."""
        for request_id in ids:
            self._engine.cancel(request_id)
        self.rest()

    def step(self) -> bool:
        return stepping.step(self._engine)[1]

    def rest(self) -> None:
        """Runs until nothing is left to do."""
        stepping.rest(self._engine)

    def _submit(self, name: str, text: str, max_tokens: int, policy: str | None = None) -> str:
        self._num_requests += 1
        request_id = f"bench-{self._num_requests}"
        self._engine.submit(Request(request_id, text, SamplingParams(max_tokens=max_tokens), name, policy=policy))
        return request_id

    def end_turns(self, names: list[str], message: str) -> None:
        """Turns of one token, stepped until all are over."""
        for name in names:
            self._submit(name, message, 1)
        while any(self._engine.conversation(name).turn is not None for name in names):
            self.step()

    def hold(self, name: str, prompt_tokens: int, answer_tokens: int) -> None:
        """One turn, and the idle work after it."""
        self._submit(name, self.message(prompt_tokens), answer_tokens)
        self.rest()

    def message(self, num_tokens: int) -> str:
        """A user message of about `num_tokens` tokens."""
        return self._text.piece(0, num_tokens)


class PolicySystem:
    """`perf.bench_peers.System` of one policy."""

    only_attention = False

    def __init__(self, bench: BenchEngine, policy: str) -> None:
        self.name = policy
        self._bench = bench
        self._names = [policy]

    def holds(self, context: int, batch: int) -> bool:
        return batch <= self._bench.limits.max_batch_size

    def begin(self, context: int, batch: int) -> None:
        self._bench.grow(self.name, self.name, context)
        self._names = [self.name, *(f"{self.name}-{i}" for i in range(1, batch))]
        for name in self._names[1:]:
            self._bench.clone(self.name, name)

    def turn_share(self) -> float:
        """The manager's share of a whole turn, commits after it included; the turn is held in a copy."""
        name = f"{self.name}-turn"
        self._bench.clone(self.name, name)
        before = self._bench.stats()
        self._bench.hold(name, TURN_PROMPT_TOKENS, TURN_ANSWER_TOKENS)
        after = self._bench.stats()
        self._bench.end(name)
        managing = after.manager_time_ms + after.commit_time_ms - before.manager_time_ms - before.commit_time_ms
        return managing / (managing + after.execute_time_ms - before.execute_time_ms)

    def decode(self, num_steps: int, budget_s: float) -> Decoded:
        ids, _, _ = self._bench.begin_turns(self._names, SHORT_MESSAGE)
        before = self._bench.stats()
        step_ms = run_steps(self._bench.step, num_steps, budget_s)
        after = self._bench.stats()
        manager_ms = after.manager_time_ms - before.manager_time_ms
        self._bench.undo(ids)
        return Decoded(step_ms, manager_ms, manager_ms + after.execute_time_ms - before.execute_time_ms)

    def prefill(self, num_tokens: int) -> float | None:
        message = self._bench.message(max(1, num_tokens // len(self._names)))
        ids, prompt_tokens, seconds = self._bench.begin_turns(self._names, message)
        self._bench.undo(ids)
        return prompt_tokens / seconds

    @property
    def kv_bytes(self) -> int:
        return self._bench.kv(self.name).kv_bytes

    @property
    def weight_bytes(self) -> int:
        return self._bench.read_weight_bytes

    def end(self) -> None:
        for name in self._names[1:]:
            self._bench.end(name)
        self._names = [self.name]

    def close(self) -> None:
        """Nothing outlives the process."""
