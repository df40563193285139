"""The names of TensorRT-LLM's older `ensemble` model, put into those of `tensorrt_llm` and back.

Its clients go on as they are: text in, text out, and its rules where they differ from the newer names':
- without top_k and top_p (or with 0 for both) the answer is greedy, whatever the temperature; with one of them the
  temperature is 1 unless given, and a top_p of 0 beside a top_k means no limit;
- an empty text in bad_words or stop_words means none;
- pad_id and length_penalty change nothing: nothing is padded, and there are no beams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runtime.errors import RequestError
from runtime.serving.contract import INPUTS as NEWER_INPUTS
from runtime.serving.responses import OUTPUTS as NEWER_OUTPUTS
from runtime.serving.tensors import DType, Fields, InputSpec, InputTensor, Value

_SAME: Mapping[str, str] = {
    "text_input": "text_input",
    "max_tokens": "sampling_param_max_tokens",
    "exclude_input_in_output": "sampling_param_exclude_input_from_output",
    "end_id": "sampling_param_end_id",
    "presence_penalty": "sampling_param_presence_penalty",
    "frequency_penalty": "sampling_param_frequency_penalty",
    "seed": "sampling_param_seed",
    "return_log_probs": "return_log_probs",
    "return_perf_metrics": "sampling_param_return_perf_metrics",
    "stream": "streaming",
}
_CHANGED: Mapping[str, str] = {
    "bad_words": "sampling_param_bad",
    "stop_words": "sampling_param_stop",
    "top_k": "sampling_param_top_k",
    "top_p": "sampling_param_top_p",
    "temperature": "sampling_param_temperature",
}
_NEWER: Mapping[str, str] = {**_SAME, **_CHANGED}
# What only one value can be asked of here, and what only beams or padding would read.
_FIXED: Mapping[str, tuple[InputSpec, int | None]] = {
    "beam_width": (InputSpec("INT32"), 1),
    "num_return_sequences": (InputSpec("INT32"), 1),
    "repetition_penalty": (InputSpec("FP32"), 1),
    "length_penalty": (InputSpec("FP32"), None),
    "pad_id": (InputSpec("INT32"), None),
}
INPUTS: Mapping[str, InputSpec] = {
    **{older: NEWER_INPUTS[newer] for older, newer in _NEWER.items()},
    **{name: spec for name, (spec, _) in _FIXED.items()},
}
_OUTPUT_NAMES: Mapping[str, str] = {
    "text_output": "text_output",
    "cumulative_logprob": "cum_log_probs",
    "output_log_probs": "output_log_probs",
    "kv_cache_reused_block": "kv_cache_reused_blocks",
    "kv_cache_alloc_new_blocks": "kv_cache_alloc_new_blocks",
    "kv_cache_alloc_total_blocks": "kv_cache_alloc_total_blocks",
    "arrival_time_ns": "arrival_time_ns",
    "first_scheduled_time_ns": "first_scheduled_time_ns",
    "first_token_time_ns": "first_token_time_ns",
    "last_token_time_ns": "last_token_time_ns",
}
OUTPUTS: Mapping[str, DType] = {older: NEWER_OUTPUTS[newer] for newer, older in _OUTPUT_NAMES.items()}


def to_newer(tensors: Sequence[InputTensor]) -> list[InputTensor]:
    """The tensors of a request to `ensemble` as those of one to `tensorrt_llm`. Raises RequestError by older name."""
    fields = Fields(tensors, INPUTS)
    for name, (_, only) in _FIXED.items():
        value = fields.number(name, 1)
        if only is not None and value != only:
            raise RequestError(f"{name}: got {value:g}, expected {only}, the one value there is here; leave it out")
    for name in ("text_input", "max_tokens"):
        if not fields.has(name):
            raise RequestError(f"{name}: got no tensor, expected one; send it with every request")
    newer = [
        InputTensor(_SAME[tensor.name], tensor.dtype, (1,), tensor.values) for tensor in tensors if tensor.name in _SAME
    ]
    for older in ("bad_words", "stop_words"):
        words = [word.encode("utf-8") for word in fields.texts(older) if word]
        if words:
            newer.append(InputTensor(_CHANGED[older], "STRING", (len(words),), words))
    if fields.flag("return_log_probs"):
        newer.append(_one("return_cumulative_logprob", True))
    return [*newer, *_sampling(fields)]


def _sampling(fields: Fields) -> list[InputTensor]:
    top_k, top_p = fields.whole("top_k") or 0, fields.number("top_p", 0.0)
    if top_k == 0 and top_p == 0.0:
        return []  # greedy
    temperature = fields.number("temperature", 1.0)
    return [
        _one("sampling_param_top_k", top_k),
        _one("sampling_param_top_p", top_p if top_p != 0.0 else 1.0),
        _one("sampling_param_temperature", temperature),
    ]


def _one(name: str, value: Value) -> InputTensor:
    return InputTensor(name, NEWER_INPUTS[name].dtype, (1,), [value])


def newer_outputs() -> tuple[str, ...]:
    """The outputs of `tensorrt_llm` that have an older name."""
    return tuple(_OUTPUT_NAMES)


def older_output(name: str) -> str | None:
    """The older name of an output of `tensorrt_llm`, None where it had none."""
    return _OUTPUT_NAMES.get(name)


def older_shape(name: str, num_values: int) -> tuple[int, ...]:
    """The shape of an output by its older name: [batch, beam, ...] but for the text, which was flat."""
    if name == "text_output":
        return (num_values,)
    return (1, 1, num_values) if name == "output_log_probs" else (1, num_values)


def older_message(message: str) -> str:
    """An error of `tensorrt_llm` with the tensor's older name."""
    for older, newer in _NEWER.items():
        if message.startswith(f"{newer}:"):
            return older + message.removeprefix(newer)
    return message
