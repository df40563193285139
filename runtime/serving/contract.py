"""The tensor contract of the model `tensorrt_llm`: names, types and checks, without Triton and without numpy.

Names follow TensorRT-LLM's LLM-API Triton model. Ours on top: conversation_id, conversation_end, system_prompt,
protect, kv_policy and stats going in; kv_bytes, kv_full_bytes, kv_state_tokens and engine_stats coming out.
A tensor here is its flat list of values with its shape; model.py converts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Literal

from runtime.errors import RequestError
from runtime.request import FinishEvent, KvStats, Request, SamplingParams

DType = Literal["STRING", "BOOL", "INT32", "INT64", "UINT64", "FP32"]
Value = bytes | bool | int | float

MAX_ID_CHARS = 256


@dataclass(frozen=True)
class InputSpec:
    """kind: "one" value, a "list" of any length, or "pairs" with shape [n, 2]."""

    dtype: DType
    kind: Literal["one", "list", "pairs"] = "one"


INPUTS: Mapping[str, InputSpec] = {
    "text_input": InputSpec("STRING"),
    "streaming": InputSpec("BOOL"),
    "sampling_param_max_tokens": InputSpec("INT32"),
    "sampling_param_temperature": InputSpec("FP32"),
    "sampling_param_top_k": InputSpec("INT32"),
    "sampling_param_top_p": InputSpec("FP32"),
    "sampling_param_stop": InputSpec("STRING", "list"),
    "sampling_param_seed": InputSpec("UINT64"),
    "sampling_param_frequency_penalty": InputSpec("FP32"),
    "sampling_param_presence_penalty": InputSpec("FP32"),
    "sampling_param_exclude_input_from_output": InputSpec("BOOL"),
    "sampling_param_return_perf_metrics": InputSpec("BOOL"),
    "return_finish_reason": InputSpec("BOOL"),
    "return_stop_reason": InputSpec("BOOL"),
    "return_cumulative_logprob": InputSpec("BOOL"),
    "stop": InputSpec("BOOL"),
    "conversation_id": InputSpec("STRING"),
    "conversation_end": InputSpec("BOOL"),
    "system_prompt": InputSpec("STRING"),
    "protect": InputSpec("INT32", "pairs"),
    "kv_policy": InputSpec("STRING"),
    "stats": InputSpec("BOOL"),
}

OUTPUTS: Mapping[str, DType] = {
    "text_output": "STRING",
    "finish_reason": "STRING",
    "stop_reason": "STRING",
    "cumulative_logprob": "FP32",
    "kv_cache_reused_block": "INT32",
    "kv_cache_missed_block": "INT32",
    "kv_cache_alloc_new_blocks": "INT32",
    "kv_cache_alloc_total_blocks": "INT32",
    "kv_cache_hit_rate": "FP32",
    "arrival_time_ns": "INT64",
    "first_scheduled_time_ns": "INT64",
    "first_token_time_ns": "INT64",
    "last_token_time_ns": "INT64",
    "kv_bytes": "INT64",
    "kv_full_bytes": "INT64",
    "kv_state_tokens": "INT32",
    "engine_stats": "STRING",
}


@dataclass(frozen=True)
class InputTensor:
    """values: all elements in row-major order, as Python values (STRING elements as bytes)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: Sequence[Value]


@dataclass(frozen=True)
class OutputTensor:
    """A one-dimensional output; STRING values are UTF-8 bytes."""

    name: str
    values: tuple[Value, ...]

    @property
    def dtype(self) -> DType:
        return OUTPUTS[self.name]


@dataclass(frozen=True)
class OutputChoice:
    """Which outputs the client asked for, and whether the text comes in pieces."""

    streaming: bool = False
    finish_reason: bool = False
    stop_reason: bool = False
    cumulative_logprob: bool = False
    perf_metrics: bool = False


@dataclass(frozen=True)
class TurnCall:
    """Run one turn."""

    request: Request
    choice: OutputChoice = field(default_factory=OutputChoice)


@dataclass(frozen=True)
class StopCall:
    """Cancel the running requests with the same Triton request id."""

    client_id: str


@dataclass(frozen=True)
class EndCall:
    """Free a conversation without running a turn."""

    conversation_id: str


@dataclass(frozen=True)
class StatsCall:
    """Report the engine's state, and a conversation's when one is named."""

    conversation_id: str | None


Call = TurnCall | StopCall | EndCall | StatsCall


def parse_call(tensors: Sequence[InputTensor], client_id: str, engine_id: str) -> Call:
    """What a request asks for. `client_id`: Triton's request id; `engine_id`: our unique one.

    Raises RequestError that names the tensor, what it held and what was expected.
    """
    fields = _Fields({tensor.name: _checked(tensor) for tensor in tensors})
    conversation_id = _identifier(fields, "conversation_id")
    if fields.flag("stop"):
        if not client_id:
            raise RequestError(
                "stop: got a request without an id, expected the id of the request to cancel; set the request id"
            )
        return StopCall(client_id)
    if fields.flag("stats"):
        return StatsCall(conversation_id)
    text = fields.text("text_input")
    ends = fields.flag("conversation_end")
    if ends and conversation_id is None:
        raise RequestError("conversation_end: got true without conversation_id, expected both; name the conversation")
    if ends and conversation_id is not None and not text:
        return EndCall(conversation_id)
    if not text:
        what = "no tensor" if text is None else "empty text"
        raise RequestError(f"text_input: got {what}, expected the prompt or the user's message; send some text")
    choice = _choice(fields)
    request = Request(
        request_id=engine_id,
        text=text,
        sampling=_sampling(fields, choice),
        conversation_id=conversation_id,
        system_prompt=fields.text("system_prompt"),
        protect=_protect(fields, len(text)),
        policy=fields.text("kv_policy"),
        end_conversation=ends,
        exclude_input_from_output=fields.flag("sampling_param_exclude_input_from_output", default=True),
    )
    return TurnCall(request, choice)


class _Fields:
    """Checked tensors, read by name; an absent tensor gives the default."""

    def __init__(self, tensors: Mapping[str, InputTensor]) -> None:
        self._tensors = tensors

    def flag(self, name: str, default: bool = False) -> bool:
        tensor = self._tensors.get(name)
        return default if tensor is None else bool(tensor.values[0])

    def number(self, name: str, default: float) -> float:
        tensor = self._tensors.get(name)
        return default if tensor is None else float(tensor.values[0])

    def whole(self, name: str) -> int | None:
        tensor = self._tensors.get(name)
        return None if tensor is None else int(tensor.values[0])

    def text(self, name: str) -> str | None:
        texts = self.texts(name)
        return texts[0] if texts else None

    def texts(self, name: str) -> tuple[str, ...]:
        tensor = self._tensors.get(name)
        return () if tensor is None else tuple(_utf8(name, value) for value in tensor.values)

    def wholes(self, name: str) -> list[int]:
        tensor = self._tensors.get(name)
        return [] if tensor is None else [int(value) for value in tensor.values]


def _checked(tensor: InputTensor) -> InputTensor:
    spec = INPUTS.get(tensor.name)
    if spec is None:
        raise RequestError(f"{tensor.name}: unknown input tensor, expected one of {', '.join(INPUTS)}; leave it out")
    if tensor.dtype != spec.dtype:
        raise RequestError(f"{tensor.name}: got data type {tensor.dtype}, expected {spec.dtype}; convert the tensor")
    shape = list(tensor.shape)
    if spec.kind == "pairs" and (len(shape) != 2 or shape[1] != 2):
        raise RequestError(f"{tensor.name}: got shape {shape}, expected [n, 2] (start, end); reshape the tensor")
    if spec.kind == "one" and prod(shape) != 1:
        raise RequestError(f"{tensor.name}: got shape {shape}, expected exactly one value; send one per request")
    assert len(tensor.values) == prod(shape), "the server delivers as many values as the shape says"
    return tensor


def _utf8(name: str, value: Value) -> str:
    if isinstance(value, str):
        return value
    assert isinstance(value, bytes)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name}: got bytes that are not UTF-8 (0x{value[error.start]:02x} at byte {error.start}), "
            "expected UTF-8 text; encode it so"
        ) from error


def _identifier(fields: _Fields, name: str) -> str | None:
    text = fields.text(name)
    if text is None:
        return None
    if not text or len(text) > MAX_ID_CHARS or not text.isprintable():
        raise RequestError(
            f"{name}: got {text[:40]!r} ({len(text)} characters), expected 1 to {MAX_ID_CHARS} printable characters; "
            "choose another id"
        )
    return text


def _protect(fields: _Fields, num_chars: int) -> tuple[tuple[int, int], ...]:
    flat = fields.wholes("protect")
    ranges = tuple(zip(flat[::2], flat[1::2], strict=True))
    for start, end in ranges:
        if not 0 <= start < end <= num_chars:
            raise RequestError(
                f"protect: got [{start}, {end}), expected 0 <= start < end <= {num_chars}, the characters of "
                "text_input; correct the range"
            )
    return ranges


def _choice(fields: _Fields) -> OutputChoice:
    return OutputChoice(
        streaming=fields.flag("streaming"),
        finish_reason=fields.flag("return_finish_reason"),
        stop_reason=fields.flag("return_stop_reason"),
        cumulative_logprob=fields.flag("return_cumulative_logprob"),
        perf_metrics=fields.flag("sampling_param_return_perf_metrics"),
    )


def _sampling(fields: _Fields, choice: OutputChoice) -> SamplingParams:
    default = SamplingParams()
    stop = fields.texts("sampling_param_stop")
    try:
        return SamplingParams(
            max_tokens=_or(fields.whole("sampling_param_max_tokens"), default.max_tokens),
            temperature=fields.number("sampling_param_temperature", default.temperature),
            top_k=_or(fields.whole("sampling_param_top_k"), default.top_k),
            top_p=fields.number("sampling_param_top_p", default.top_p),
            frequency_penalty=fields.number("sampling_param_frequency_penalty", default.frequency_penalty),
            presence_penalty=fields.number("sampling_param_presence_penalty", default.presence_penalty),
            seed=fields.whole("sampling_param_seed"),
            stop=stop,
            want_logprobs=choice.cumulative_logprob,
        )
    except RequestError as error:
        raise RequestError(f"sampling_param_{error}") from error


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def text_outputs(text: str, cumulative_logprob: float, choice: OutputChoice) -> tuple[OutputTensor, ...]:
    """A piece of the answer on its way."""
    outputs = [OutputTensor("text_output", (text.encode("utf-8"),))]
    if choice.cumulative_logprob:
        outputs.append(OutputTensor("cumulative_logprob", (float(cumulative_logprob),)))
    return tuple(outputs)


def finish_outputs(
    text: str, event: FinishEvent, choice: OutputChoice, engine_stats: Mapping[str, object]
) -> tuple[OutputTensor, ...]:
    """The last response of a turn; `text` is empty when the pieces went out before."""
    outputs = [*text_outputs(text, event.cumulative_logprob, choice), *kv_outputs(event.stats.kv)]
    if choice.finish_reason:
        outputs.append(OutputTensor("finish_reason", (event.reason.encode(),)))
    if choice.stop_reason:
        outputs.append(OutputTensor("stop_reason", (event.stop_reason.encode("utf-8"),)))
    if choice.perf_metrics:
        stats = event.stats
        looked_up = stats.reused_blocks + stats.missed_blocks
        outputs += [
            OutputTensor("kv_cache_reused_block", (stats.reused_blocks,)),
            OutputTensor("kv_cache_missed_block", (stats.missed_blocks,)),
            OutputTensor("kv_cache_alloc_new_blocks", (stats.alloc_new_blocks,)),
            OutputTensor("kv_cache_alloc_total_blocks", (stats.alloc_total_blocks,)),
            OutputTensor("kv_cache_hit_rate", (stats.reused_blocks / looked_up if looked_up else 0.0,)),
            OutputTensor("arrival_time_ns", (stats.arrival_ns,)),
            OutputTensor("first_scheduled_time_ns", (stats.first_scheduled_ns,)),
            OutputTensor("first_token_time_ns", (stats.first_token_ns,)),
            OutputTensor("last_token_time_ns", (stats.last_token_ns,)),
            OutputTensor("engine_stats", (json.dumps({**engine_stats, "turn": asdict(stats)}).encode(),)),
        ]
    return tuple(outputs)


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
        OutputTensor("text_output", (b"",)),
        *kv_outputs(kv or KvStats()),
        OutputTensor("engine_stats", (json.dumps(report).encode(),)),
    )


def empty_outputs() -> tuple[OutputTensor, ...]:
    """The answer to a request that only acts (stop, conversation_end)."""
    return (OutputTensor("text_output", (b"",)),)
