"""What the engine counts about itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from runtime.kv_totals import KvTotals
from runtime.request import KvStats
from runtime.step import PublishResult

# Why a conversation lost its cache, or was ended, without its client asking for it.
# memory: pages were needed elsewhere; preempted: a running turn gave way; rollback: a turn was undone past what can be
# restored; count, bytes, idle: a limit on conversations.
EvictionReason = Literal["memory", "preempted", "rollback", "count", "bytes", "idle"]
EVICTION_REASONS: tuple[EvictionReason, ...] = get_args(EvictionReason)


@dataclass(frozen=True)
class EngineLoad:
    """Turns at this moment.

    context: running turns that still read their prompt; `context_tokens` is what they have left to read.
    max_running: places in the batch.
    """

    running: int = 0
    waiting: int = 0
    context: int = 0
    context_tokens: int = 0
    max_running: int = 0
    idle: bool = True


@dataclass(frozen=True)
class EngineStats:
    """A snapshot since start; warm-up is not counted.

    renewals: caches whose place was taken by one that was computed anew.
    manager_time_ratio: (planning + settling + commits) / (those + the executor's time on rows); probes run in
    spare time and are counted apart.
    """

    total_kv_bytes: int
    full_kv_bytes: int
    conversations: int
    running: int
    waiting: int
    context: int
    context_tokens: int
    max_running: int
    idle: bool
    steps: int
    tokens: int
    generated_tokens: int
    commits: int
    probes: int
    probes_interrupted: int
    renewals: int
    absorbed: int
    dropped: int
    manager_time_ms: float
    execute_time_ms: float
    commit_time_ms: float
    probe_time_ms: float
    manager_time_ratio: float
    evictions: Mapping[str, int]
    kv: KvTotals


@dataclass
class Figures:
    """Running sums; written by the engine's thread only, or with its lock held."""

    manager_ns: int = 0
    execute_ns: int = 0
    commit_ns: int = 0
    probe_ns: int = 0
    steps: int = 0
    tokens: int = 0
    generated: int = 0
    commits: int = 0
    probes: int = 0
    probes_interrupted: int = 0
    renewals: int = 0
    absorbed: int = 0
    dropped: int = 0
    evictions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EVICTION_REASONS, 0))

    def clear(self) -> None:
        """Starts again at zero, after warm-up."""
        vars(self).update(vars(Figures()))

    def count_step(self, num_tokens: int, num_generated: int) -> None:
        self.steps += 1
        self.tokens += num_tokens
        self.generated += num_generated

    def count_probe(self, duration_ns: int, done: bool) -> None:
        self.probe_ns += duration_ns
        self.probes += done
        self.probes_interrupted += not done

    def count_commit(self, result: PublishResult) -> None:
        """One was settled. The time of commits goes to `commit_ns` as it is spent."""
        self.commits += 1
        self.absorbed += result.absorbed
        self.dropped += result.dropped

    def count_eviction(self, reason: EvictionReason) -> None:
        """A conversation lost its cache, or was ended, without its client asking for it."""
        self.evictions[reason] += 1

    def snapshot(self, kv: Sequence[KvStats], load: EngineLoad, totals: KvTotals) -> EngineStats:
        managing = self.manager_ns + self.commit_ns
        busy = managing + self.execute_ns
        return EngineStats(
            total_kv_bytes=sum(k.kv_bytes for k in kv),
            full_kv_bytes=sum(k.kv_full_bytes for k in kv),
            conversations=len(kv),
            running=load.running,
            waiting=load.waiting,
            context=load.context,
            context_tokens=load.context_tokens,
            max_running=load.max_running,
            idle=load.idle,
            steps=self.steps,
            tokens=self.tokens,
            generated_tokens=self.generated,
            commits=self.commits,
            probes=self.probes,
            probes_interrupted=self.probes_interrupted,
            renewals=self.renewals,
            absorbed=self.absorbed,
            dropped=self.dropped,
            manager_time_ms=self.manager_ns / 1e6,
            execute_time_ms=self.execute_ns / 1e6,
            commit_time_ms=self.commit_ns / 1e6,
            probe_time_ms=self.probe_ns / 1e6,
            manager_time_ratio=managing / busy if busy else 0.0,
            evictions=dict(self.evictions),
            kv=totals,
        )
