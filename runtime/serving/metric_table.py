"""Which metrics the server exports, and how each is read. Data only; `runtime.serving.metrics` reports them.

Names and labels are TensorRT-LLM's where its Triton backend has one that means the same (`nv_trt_llm_*` and `nv_llm_*`,
see its custom_metrics_reporter.cc); what only CommitKV has is called `commitkv_*`. Counters end in `_total`, units are
in names. The engine's counters start after warm-up, see `runtime.warm_up`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from runtime.checkpoint_hook import CheckpointFigures
from runtime.errors import (
    ConversationBusyError,
    LostConversationError,
    OutOfMemoryError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    ServerStoppingError,
    StoreUnavailableError,
    TurnTooLargeError,
    UnknownConversationError,
    UnknownPolicyError,
    UnsupportedPolicyError,
)
from runtime.figures import EVICTION_REASONS, EngineStats
from runtime.request import FinishEvent, FinishReason

Kind = Literal["counter", "gauge", "histogram"]

# Seconds. Turns of an agent last from a tenth of a second to minutes, tokens from a millisecond to a stalled second.
TURN_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
# Tokens; TensorRT-LLM's own.
LENGTH_BUCKETS = (10.0, 50.0, 100.0, 500.0, 1000.0)

CHECKPOINT_OUTCOMES = ("written", "failed", "deleted", "swept", "restored", "recomputed", "refused")


@dataclass(frozen=True)
class MetricSpec:
    """One metric family. label: the one label besides `model` and `version`, with its `values`; "": none."""

    name: str
    kind: Kind
    help: str
    label: str = ""
    values: tuple[str, ...] = ("",)
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True)
class Reading:
    """What engine metrics are read from."""

    engine: EngineStats
    checkpoints: CheckpointFigures
    resident_bytes: int
    loop_alive: bool


Values = Mapping[str, float]  # by label value; "" where there is no label


@dataclass(frozen=True)
class EngineMetric:
    """A gauge, or a counter of which `read` gives the running sum."""

    spec: MetricSpec
    read: Callable[[Reading], Values]


@dataclass(frozen=True)
class TurnMetric:
    """A counter or histogram; `read` gives what a finished turn adds to it. Label values not named get nothing."""

    spec: MetricSpec
    read: Callable[[FinishEvent], Values]


def _gauge(name: str, text: str, read: Callable[[Reading], float]) -> EngineMetric:
    return EngineMetric(MetricSpec(name, "gauge", text), lambda reading: {"": read(reading)})


def _counter(name: str, text: str, read: Callable[[Reading], float]) -> EngineMetric:
    return EngineMetric(MetricSpec(name, "counter", text), lambda reading: {"": read(reading)})


def _gauges(
    name: str, label: str, values: tuple[str, ...], text: str, read: Callable[[Reading], Values]
) -> EngineMetric:
    return EngineMetric(MetricSpec(name, "gauge", text, label, values), read)


def _counters(
    name: str, label: str, values: tuple[str, ...], text: str, read: Callable[[Reading], Values]
) -> EngineMetric:
    return EngineMetric(MetricSpec(name, "counter", text, label, values), read)


def _requests(r: Reading) -> Values:
    e = r.engine
    return {
        "active": e.running + e.waiting,
        "max": e.max_running,
        "scheduled": e.running,
        "context": e.context,
        "waiting": e.waiting,
    }


def _blocks(r: Reading) -> Values:
    kv = r.engine.kv
    most, used = kv.budget_bytes // kv.page_bytes, -(-kv.used_bytes // kv.page_bytes)
    return {
        "max": most,
        "used": used,
        "free": most - used,
        "tokens_per": kv.page_tokens,
        "fraction": kv.used_bytes / kv.budget_bytes if kv.budget_bytes else 0.0,
    }


def _kv_bytes(r: Reading) -> Values:
    kv = r.engine.kv
    return {
        "active": kv.active_bytes,
        "staged": kv.staged_bytes,
        "committed": kv.committed_bytes,
        "evictable": kv.evictable_bytes,
        "scratch": kv.scratch_bytes,
        "tables": kv.table_bytes,
    }


def _kv_tokens(r: Reading) -> Values:
    kv = r.engine.kv
    return {
        "active": kv.active_tokens,
        "staged": kv.staged_tokens,
        "committed": kv.committed_tokens,
        "evictable": kv.evictable_tokens,
    }


def _seconds(r: Reading) -> Values:
    e = r.engine
    times = {"plan": e.manager_time_ms, "execute": e.execute_time_ms, "commit": e.commit_time_ms}
    return {part: ms / 1e3 for part, ms in {**times, "probe": e.probe_time_ms}.items()}


def _batcher(r: Reading) -> Values:
    e = r.engine
    return {"generation_requests": e.running - e.context, "total_context_tokens": e.context_tokens}


def _general(r: Reading) -> Values:
    return {"iteration_counter": r.engine.steps, "timestamp": time.time_ns() // 1000}


def _compression(r: Reading) -> float:
    return r.engine.total_kv_bytes / r.engine.full_kv_bytes if r.engine.full_kv_bytes else 1.0


ENGINE_METRICS: tuple[EngineMetric, ...] = (
    _gauges(
        "nv_trt_llm_request_metrics",
        "request_type",
        ("active", "max", "scheduled", "context", "waiting"),
        "Turns: active (all), max (places in the batch), scheduled (running), context (those still reading), waiting",
        _requests,
    ),
    _gauges(
        "nv_trt_llm_kv_cache_block_metrics",
        "kv_cache_block_type",
        ("max", "used", "free", "tokens_per", "fraction"),
        "KV memory counted in pages of full precision; fraction: share of its bytes in use",
        _blocks,
    ),
    _gauges(
        "nv_trt_llm_inflight_batcher_metrics",
        "inflight_batcher_specific_metric",
        ("generation_requests", "total_context_tokens"),
        "Running turns that generate, and prompt tokens that the others have still to read",
        _batcher,
    ),
    _gauges(
        "nv_trt_llm_general_metrics",
        "general_type",
        ("iteration_counter", "timestamp"),
        "Engine steps since start, and the time of this reading in microseconds since 1970",
        _general,
    ),
    _gauges(
        "nv_trt_llm_runtime_memory_metrics",
        "memory_type",
        ("cpu",),
        "Resident bytes of the model's process",
        lambda r: {"cpu": r.resident_bytes},
    ),
    _gauges(
        "commitkv_kv_bytes",
        "state",
        ("active", "staged", "committed", "evictable", "scratch", "tables"),
        "KV bytes by state: pages (active, staged), blocks (committed, evictable), pages of probes and "
        "of caches computed anew (scratch), tables",
        _kv_bytes,
    ),
    _gauges(
        "commitkv_kv_tokens",
        "state",
        ("active", "staged", "committed", "evictable"),
        "Token equivalents by state: entries over layers and KV heads",
        _kv_tokens,
    ),
    _gauge("commitkv_kv_budget_bytes", "Bound on pages and blocks together", lambda r: r.engine.kv.budget_bytes),
    _gauge("commitkv_kv_saved_bytes", "Bytes that shared system prompts save", lambda r: r.engine.kv.saved_bytes),
    _gauge("commitkv_kv_full_bytes", "Bytes of an fp16 cache of the same tokens", lambda r: r.engine.full_kv_bytes),
    _gauge(
        "commitkv_compression_ratio", "KV bytes over those of a full fp16 cache; 1 when nothing is held", _compression
    ),
    _gauge("commitkv_conversations", "Conversations held", lambda r: r.engine.conversations),
    _gauge("commitkv_running_turns", "Turns in the batch", lambda r: r.engine.running),
    _gauge("commitkv_queue_length", "Turns that wait for a place in the batch", lambda r: r.engine.waiting),
    _gauge("commitkv_engine_up", "1 while the engine's loop runs", lambda r: float(r.loop_alive)),
    _gauge(
        "commitkv_manager_time_ratio",
        "Planning, settling and commits over these and the steps' own time, since start",
        lambda r: r.engine.manager_time_ratio,
    ),
    _counters(
        "commitkv_engine_seconds_total",
        "part",
        ("plan", "execute", "commit", "probe"),
        "The engine's time: planning and settling, steps, commits, probes",
        _seconds,
    ),
    _counter("commitkv_steps_total", "Engine steps", lambda r: r.engine.steps),
    _counter("commitkv_step_tokens_total", "Rows of steps: prompts, answers, recomputation", lambda r: r.engine.tokens),
    _counter("commitkv_commits_total", "Commit transitions", lambda r: r.engine.commits),
    _counters(
        "commitkv_probes_total",
        "outcome",
        ("done", "interrupted"),
        "Probes, by how they ended",
        lambda r: {"done": r.engine.probes, "interrupted": r.engine.probes_interrupted},
    ),
    _counter("commitkv_renewals_total", "Caches replaced by one computed anew", lambda r: r.engine.renewals),
    _counter("commitkv_absorbed_entries_total", "Entries absorbed by a near one", lambda r: r.engine.absorbed),
    _counter("commitkv_evicted_entries_total", "Entries dropped below the line", lambda r: r.engine.dropped),
    _counters(
        "commitkv_evictions_total",
        "reason",
        EVICTION_REASONS,
        "Conversations that lost their cache, or were ended, unasked",
        lambda r: r.engine.evictions,
    ),
    _counters(
        "commitkv_checkpoints_total",
        "outcome",
        CHECKPOINT_OUTCOMES,
        "Checkpoints: written, failed to be, deleted by their clients, swept by age or count; conversations restored, "
        "recomputed from their text alone, refused",
        lambda r: {outcome: getattr(r.checkpoints, outcome) for outcome in CHECKPOINT_OUTCOMES},
    ),
    _counter("commitkv_checkpoint_bytes_total", "Bytes of checkpoints written", lambda r: r.checkpoints.written_bytes),
    _gauge("commitkv_checkpoints_waiting", "Conversations not yet copied out", lambda r: r.checkpoints.waiting),
)


def _span(start_ns: int, end_ns: int) -> Values:
    """Seconds between two moments; nothing if one of them never came."""
    return {"": (end_ns - start_ns) / 1e9} if start_ns and end_ns else {}


TURNS_NAME = "commitkv_turns_total"


def _turn_tokens(event: FinishEvent) -> Values:
    s = event.stats
    return {"prompt": s.prompt_tokens, "generated": s.generated_tokens, "reused": s.reused_tokens}


def _histogram(
    name: str,
    text: str,
    buckets: tuple[float, ...],
    read: Callable[[FinishEvent], Values],
    label: tuple[str, str] = ("", ""),
) -> TurnMetric:
    """label: its name and its one value."""
    return TurnMetric(MetricSpec(name, "histogram", text, label[0], (label[1],), buckets), read)


TURN_METRICS: tuple[TurnMetric, ...] = (
    TurnMetric(
        MetricSpec(TURNS_NAME, "counter", "Turns that ended, by reason", "finish_reason", get_args(FinishReason)),
        lambda event: {event.reason: 1},
    ),
    TurnMetric(
        MetricSpec(
            "commitkv_tokens_total",
            "counter",
            "Tokens of ended turns: new ones of prompts, generated ones, those of earlier turns that were still held",
            "kind",
            ("prompt", "generated", "reused"),
        ),
        _turn_tokens,
    ),
    TurnMetric(
        MetricSpec("commitkv_recomputed_tokens_total", "counter", "Tokens of earlier turns that were computed again"),
        lambda event: {"": event.stats.recomputed_tokens},
    ),
    _histogram(
        "nv_llm_input_token_len",
        "New prompt tokens of a turn",
        LENGTH_BUCKETS,
        lambda event: {"total_input_tokens": event.stats.prompt_tokens},
        ("response_metric_type", "total_input_tokens"),
    ),
    _histogram(
        "nv_llm_output_token_len",
        "Generated tokens of a turn",
        LENGTH_BUCKETS,
        lambda event: {"total_output_tokens": event.stats.generated_tokens},
        ("response_metric_type", "total_output_tokens"),
    ),
    _histogram(
        "commitkv_queue_seconds",
        "From a turn's arrival to its first row in a step",
        TURN_BUCKETS,
        lambda event: _span(event.stats.arrival_ns, event.stats.first_scheduled_ns),
    ),
    _histogram(
        "commitkv_time_to_first_token_seconds",
        "From a turn's arrival to its first token",
        TURN_BUCKETS,
        lambda event: _span(event.stats.arrival_ns, event.stats.first_token_ns),
    ),
    _histogram(
        "commitkv_turn_seconds",
        "From a turn's arrival to its last token",
        TURN_BUCKETS,
        lambda event: _span(event.stats.arrival_ns, event.stats.last_token_ns),
    ),
)

INTER_TOKEN = MetricSpec(
    "commitkv_inter_token_seconds",
    "histogram",
    "Between two pieces of an answer, nearly always one token each, as they leave the engine",
    buckets=TOKEN_BUCKETS,
)

REFUSAL_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (PromptTooLongError, "prompt_too_long"),
    (ConversationBusyError, "conversation_busy"),
    (LostConversationError, "lost_conversation"),
    (UnknownConversationError, "unknown_conversation"),
    (UnknownPolicyError, "policy"),
    (UnsupportedPolicyError, "policy"),
    (TurnTooLargeError, "turn_too_large"),
    (StoreUnavailableError, "store_unavailable"),
    (QueueFullError, "queue_full"),
    (OutOfMemoryError, "no_room"),
    (ServerStoppingError, "stopping"),
    (RequestError, "invalid"),
    (Exception, "internal"),
)
REFUSALS = MetricSpec(
    "commitkv_refusals_total",
    "counter",
    "Requests that were refused before they ran",
    "reason",
    tuple(dict.fromkeys(reason for _, reason in REFUSAL_REASONS)),
)

ALL_METRICS: tuple[MetricSpec, ...] = (
    *(metric.spec for metric in ENGINE_METRICS),
    *(metric.spec for metric in TURN_METRICS),
    INTER_TOKEN,
    REFUSALS,
)


def refusal_reason(error: Exception) -> str:
    """The label value of `commitkv_refusals_total` for one of our errors."""
    return next(reason for kind, reason in REFUSAL_REASONS if isinstance(error, kind))
