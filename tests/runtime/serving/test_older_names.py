"""TensorRT-LLM's older names: the same request by the newer ones, with the older rules."""

from __future__ import annotations

import pytest

from runtime.errors import RequestError
from runtime.request import Request
from runtime.serving.contract import Origin, OutputChoice, TurnCall, parse_call
from runtime.serving.older_names import (
    INPUTS,
    OUTPUTS,
    newer_outputs,
    older_message,
    older_output,
    older_shape,
    to_newer,
)
from runtime.serving.responses import OUTPUTS as NEWER_OUTPUTS
from runtime.serving.tensors import InputTensor, Value


def one(name: str, value: Value) -> InputTensor:
    return InputTensor(name, INPUTS[name].dtype, (1,), [value])


def words(name: str, *values: bytes) -> InputTensor:
    return InputTensor(name, "STRING", (len(values),), values)


def call(*tensors: InputTensor) -> TurnCall:
    made = parse_call(to_newer([one("text_input", b"hello"), one("max_tokens", 5), *tensors]), Origin("engine-1"))
    assert isinstance(made, TurnCall)
    return made


def test_everything_by_its_older_name() -> None:
    made = call(
        words("bad_words", b"darn", "blöd".encode()),
        words("stop_words", b"\n\n", b""),
        one("top_k", 40),
        one("top_p", 0.5),
        one("temperature", 0.25),
        one("stream", True),
        one("exclude_input_in_output", False),
        one("end_id", 2),
        one("pad_id", 2),
        one("presence_penalty", 0.5),
        one("frequency_penalty", -0.5),
        one("seed", 7),
        one("return_log_probs", True),
        one("return_perf_metrics", True),
        one("beam_width", 1),
        one("num_return_sequences", 1),
        one("repetition_penalty", 1.0),
        one("length_penalty", 2.0),
    )
    sampling = made.request.sampling
    assert (made.request.text, sampling.max_tokens, sampling.seed, sampling.end_id) == ("hello", 5, 7, 2)
    assert (sampling.bad, sampling.stop) == (("darn", "blöd"), ("\n\n",))
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (40, 0.5, 0.25)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.want_logprobs) == (0.5, -0.5, True)
    assert not made.request.exclude_input_from_output
    assert made.choice == OutputChoice(streaming=True, cumulative_logprob=True, perf_metrics=True, log_probs=True)


def test_the_least_request() -> None:
    request = call().request
    assert request == Request("engine-1", "hello", request.sampling)
    assert request.sampling.max_tokens == 5 and request.sampling.temperature == 0.0


@pytest.mark.parametrize(
    ("given", "top_k", "top_p", "temperature"),
    [
        ({}, 0, 1.0, 0.0),
        ({"temperature": 1.0}, 0, 1.0, 0.0),
        ({"top_k": 0, "top_p": 0.0, "temperature": 0.7}, 0, 1.0, 0.0),
        ({"top_k": 50}, 50, 1.0, 1.0),
        ({"top_k": 50, "top_p": 0.0, "temperature": 0.5}, 50, 1.0, 0.5),
        ({"top_p": 0.75}, 0, 0.75, 1.0),
        ({"top_k": 1}, 1, 1.0, 1.0),
    ],
)
def test_greedy_unless_a_limit_says_otherwise(
    given: dict[str, float], top_k: int, top_p: float, temperature: float
) -> None:
    sampling = call(*(one(name, value) for name, value in given.items())).request.sampling
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (top_k, top_p, temperature)


@pytest.mark.parametrize("name", ["bad_words", "stop_words"])
@pytest.mark.parametrize("values", [(b"",), (b"", b"")])
def test_an_empty_word_is_none(name: str, values: tuple[bytes, ...]) -> None:
    sampling = call(words(name, *values)).request.sampling
    assert sampling.bad == sampling.stop == ()


@pytest.mark.parametrize(
    ("tensor", "part"),
    [
        (one("beam_width", 4), "beam_width: got 4, expected 1"),
        (one("num_return_sequences", 2), "num_return_sequences: got 2"),
        (one("repetition_penalty", 1.25), "repetition_penalty: got 1.25, expected 1"),
        (InputTensor("max_tokens", "INT64", (1,), [5]), "max_tokens: got data type INT64, expected INT32"),
        (InputTensor("top_k", "INT32", (2,), [5, 6]), r"top_k: got shape \[2\]"),
        (words("bad_words", b"\xff"), "bad_words: got bytes that are not UTF-8"),
        (one("max_tokens", 5), "max_tokens: got the tensor twice"),
        (InputTensor("lora_task_id", "UINT64", (1,), [1]), "lora_task_id: unknown input tensor"),
    ],
)
def test_what_cannot_be_is_refused_by_its_older_name(tensor: InputTensor, part: str) -> None:
    with pytest.raises(RequestError, match=part):
        to_newer([one("text_input", b"x"), one("max_tokens", 1), tensor])


@pytest.mark.parametrize("name", ["text_input", "max_tokens"])
def test_what_must_be_there(name: str) -> None:
    tensors = [one("text_input", b"x"), one("max_tokens", 1)]
    with pytest.raises(RequestError, match=f"{name}: got no tensor"):
        to_newer([tensor for tensor in tensors if tensor.name != name])


def test_errors_that_the_newer_model_finds_get_the_older_name() -> None:
    for tensor, part in (
        (one("temperature", -1.0), "temperature: got -1.0"),
        (words("bad_words", b"x" * 300), "bad_w"),
    ):
        with pytest.raises(RequestError) as caught:
            call(one("top_k", 2), tensor)
        assert str(caught.value).startswith("sampling_param_") and older_message(str(caught.value)).startswith(part)
    assert older_message("queue: 3 turns are waiting") == "queue: 3 turns are waiting"


def test_outputs_by_older_names() -> None:
    assert {older_output(name) for name in newer_outputs()} == set(OUTPUTS)
    assert older_output("kv_bytes") is None
    assert all(OUTPUTS[older_output(name) or ""] == NEWER_OUTPUTS[name] for name in newer_outputs())
    assert older_shape("text_output", 1) == (1,)
    assert older_shape("cum_log_probs", 1) == (1, 1) and older_shape("output_log_probs", 7) == (1, 1, 7)
