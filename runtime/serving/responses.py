"""What the model `tensorrt_llm` answers: the output tensors of every kind of response.

Names follow TensorRT-LLM's LLM-API Triton model (output_log_probs: its older ensemble). CommitKV's own:
conversation_id, kv_bytes, kv_full_bytes, kv_state_tokens, kv_recomputed_tokens, kv_note and engine_stats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from runtime.request import FinishEvent, KvStats, TurnStats
from runtime.serving.contract import OutputChoice
from runtime.serving.tensors import DType, Value

OUTPUTS: Mapping[str, DType] = {
    "text_output": "STRING",
    "finish_reason": "STRING",
    "stop_reason": "STRING",
    "cumulative_logprob": "FP32",
    "output_log_probs": "FP32",
    "kv_cache_reused_block": "INT32",
    "kv_cache_missed_block": "INT32",
    "kv_cache_alloc_new_blocks": "INT32",
    "kv_cache_alloc_total_blocks": "INT32",
    "kv_cache_hit_rate": "FP32",
    "arrival_time_ns": "INT64",
    "first_scheduled_time_ns": "INT64",
    "first_token_time_ns": "INT64",
    "last_token_time_ns": "INT64",
    "conversation_id": "STRING",
    "kv_bytes": "INT64",
    "kv_full_bytes": "INT64",
    "kv_state_tokens": "INT32",
    "kv_recomputed_tokens": "INT32",
    "kv_note": "STRING",
    "engine_stats": "STRING",
}


@dataclass(frozen=True)
class OutputTensor:
    """A one-dimensional output; STRING values are UTF-8 bytes."""

    name: str
    values: tuple[Value, ...]

    @property
    def dtype(self) -> DType:
        return OUTPUTS[self.name]


@dataclass(frozen=True)
class Piece:
    """A part of the answer: its text, the log-probabilities of the tokens since the part before, and their sum over
    the whole answer so far."""

    text: str
    logprobs: Sequence[float] = ()
    cumulative_logprob: float = 0.0


def text_outputs(piece: Piece, choice: OutputChoice) -> tuple[OutputTensor, ...]:
    """A piece of the answer on its way."""
    outputs = [_text("text_output", piece.text)]
    if choice.cumulative_logprob:
        outputs.append(OutputTensor("cumulative_logprob", (float(piece.cumulative_logprob),)))
    if choice.log_probs:
        outputs.append(OutputTensor("output_log_probs", tuple(map(float, piece.logprobs))))
    if choice.conversation_id:
        outputs.append(_text("conversation_id", choice.conversation_id))
    return tuple(outputs)


def finish_outputs(
    piece: Piece, event: FinishEvent, choice: OutputChoice, engine_stats: Mapping[str, object]
) -> tuple[OutputTensor, ...]:
    """The last response of a turn; `piece` has no text when all of it went out before."""
    stats = event.stats
    outputs = [
        *text_outputs(piece, choice),
        *kv_outputs(stats.kv),
        OutputTensor("kv_recomputed_tokens", (stats.recomputed_tokens,)),
        _text("kv_note", stats.recomputed_reason),
    ]
    if choice.finish_reason:
        outputs.append(_text("finish_reason", event.reason))
    if choice.stop_reason:
        outputs.append(_text("stop_reason", event.stop_reason))
    if choice.perf_metrics:
        outputs += _perf_outputs(stats)
        outputs.append(_text("engine_stats", json.dumps({**engine_stats, "turn": asdict(stats)})))
    return tuple(outputs)


def _perf_outputs(stats: TurnStats) -> list[OutputTensor]:
    """Counts of the turn's cache blocks, and times of the monotonic clock (0: never came to that)."""
    looked_up = stats.reused_blocks + stats.missed_blocks
    return [
        OutputTensor("kv_cache_reused_block", (stats.reused_blocks,)),
        OutputTensor("kv_cache_missed_block", (stats.missed_blocks,)),
        OutputTensor("kv_cache_alloc_new_blocks", (stats.alloc_new_blocks,)),
        OutputTensor("kv_cache_alloc_total_blocks", (stats.alloc_total_blocks,)),
        OutputTensor("kv_cache_hit_rate", (stats.reused_blocks / looked_up if looked_up else 0.0,)),
        OutputTensor("arrival_time_ns", (stats.arrival_ns,)),
        OutputTensor("first_scheduled_time_ns", (stats.first_scheduled_ns,)),
        OutputTensor("first_token_time_ns", (stats.first_token_ns,)),
        OutputTensor("last_token_time_ns", (stats.last_token_ns,)),
    ]


def kv_outputs(kv: KvStats) -> tuple[OutputTensor, ...]:
    """kv_bytes and kv_full_bytes; kv_state_tokens is [active, staged, committed, evicted]."""
    return (
        OutputTensor("kv_bytes", (kv.kv_bytes,)),
        OutputTensor("kv_full_bytes", (kv.kv_full_bytes,)),
        OutputTensor("kv_state_tokens", (kv.active, kv.staged, kv.committed, kv.evicted)),
    )


def stats_outputs(kv: KvStats | None, engine_stats: Mapping[str, object]) -> tuple[OutputTensor, ...]:
    """The answer to a `stats` request."""
    report = {**engine_stats, "conversation": None if kv is None else asdict(kv)}
    return (
        _text("text_output", ""),
        *kv_outputs(kv or KvStats()),
        _text("engine_stats", json.dumps(report)),
    )


def empty_outputs() -> tuple[OutputTensor, ...]:
    """The answer to a request that only acts (stop, conversation_end)."""
    return (_text("text_output", ""),)


def _text(name: str, text: str) -> OutputTensor:
    return OutputTensor(name, (text.encode("utf-8"),))
