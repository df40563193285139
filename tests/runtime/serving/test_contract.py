import json
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import RequestError
from runtime.request import FinishEvent, KvStats, TurnStats
from runtime.serving.contract import (
    INPUTS,
    OUTPUTS,
    EndCall,
    InputTensor,
    OutputChoice,
    StatsCall,
    StopCall,
    TurnCall,
    Value,
    finish_outputs,
    parse_call,
    stats_outputs,
    text_outputs,
)


def one(name: str, value: Value) -> InputTensor:
    return InputTensor(name, INPUTS[name].dtype, (1,), [value])


def parse(*tensors: InputTensor, client_id: str = "c") -> object:
    return parse_call(tensors, client_id, "engine-1")


def turn(*tensors: InputTensor, text: bytes = b"hello") -> TurnCall:
    call = parse(one("text_input", text), *tensors)
    assert isinstance(call, TurnCall)
    return call


def test_a_turn_with_everything() -> None:
    call = turn(
        one("streaming", True),
        one("sampling_param_max_tokens", 7),
        one("sampling_param_temperature", 0.5),
        one("sampling_param_top_k", 40),
        one("sampling_param_top_p", 0.9),
        InputTensor("sampling_param_stop", "STRING", (2,), [b"\n\n", b"ende"]),
        one("sampling_param_seed", 2**64 - 1),
        one("sampling_param_frequency_penalty", 0.1),
        one("sampling_param_presence_penalty", -0.1),
        one("sampling_param_exclude_input_from_output", False),
        one("sampling_param_return_perf_metrics", True),
        one("return_finish_reason", True),
        one("return_stop_reason", True),
        one("return_cumulative_logprob", True),
        one("conversation_id", "gespräch".encode()),
        one("conversation_end", True),
        one("system_prompt", b"be brief"),
        InputTensor("protect", "INT32", (2, 2), [0, 2, 3, 5]),
        one("kv_policy", b"full"),
    )
    request, sampling = call.request, call.request.sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.seed) == (7, 40, 2**64 - 1)
    assert (sampling.temperature, sampling.top_p, sampling.stop) == (0.5, 0.9, ("\n\n", "ende"))
    assert sampling.want_logprobs
    assert request.conversation_id == "gespräch" and request.end_conversation
    assert request.protect == ((0, 2), (3, 5))
    assert request.policy == "full" and request.system_prompt == "be brief"
    assert not request.exclude_input_from_output
    assert call.choice == OutputChoice(True, True, True, True, True)


def test_defaults_are_greedy_and_whole() -> None:
    call = turn()
    assert call.choice == OutputChoice()
    assert call.request.sampling.temperature == 0.0
    assert call.request.conversation_id is None and call.request.policy is None
    assert call.request.exclude_input_from_output


def test_calls_that_run_no_turn() -> None:
    assert parse(one("stop", True), client_id="r7") == StopCall("r7")
    assert parse(one("stats", True)) == StatsCall(None)
    assert parse(one("stats", True), one("conversation_id", b"a")) == StatsCall("a")
    assert parse(one("conversation_end", True), one("conversation_id", b"a")) == EndCall("a")
    assert isinstance(parse(one("stop", False), one("text_input", b"x")), TurnCall)


@pytest.mark.parametrize(
    ("tensor", "part"),
    [
        (InputTensor("text_input", "STRING", (2,), [b"a", b"b"]), r"text_input: got shape \[2\]"),
        (InputTensor("text_input", "INT32", (1,), [1]), "text_input: got data type INT32, expected STRING"),
        (one("text_input", b"ab\xff"), r"text_input: .*0xff at byte 2"),
        (one("text_input", b""), "text_input: got empty text"),
        (one("sampling_param_max_tokens", -1), "sampling_param_max_tokens: got -1"),
        (one("sampling_param_temperature", -0.5), "sampling_param_temperature: got -0.5"),
        (one("sampling_param_temperature", float("nan")), "sampling_param_temperature: got nan"),
        (one("sampling_param_top_k", -3), "sampling_param_top_k"),
        (one("sampling_param_top_p", 0.0), "sampling_param_top_p"),
        (one("sampling_param_top_p", 1.5), "sampling_param_top_p"),
        (one("sampling_param_frequency_penalty", 3.0), "sampling_param_frequency_penalty"),
        (one("sampling_param_presence_penalty", -3.0), "sampling_param_presence_penalty"),
        (one("sampling_param_stop", b""), "sampling_param_stop: got an empty stop string"),
        (one("sampling_param_stop", b"\xc3"), "^sampling_param_stop: .*UTF-8"),
        (one("conversation_id", b""), "conversation_id: got ''"),
        (one("conversation_id", b"x" * 257), "conversation_id: .*257 characters"),
        (one("conversation_id", b"a\nb"), "conversation_id"),
        (one("conversation_end", True), "conversation_end"),
        (InputTensor("protect", "INT32", (4,), [0, 1, 2, 3]), r"protect: got shape \[4\]"),
        (InputTensor("protect", "INT32", (1, 2), [-1, 3]), r"protect: got \[-1, 3\)"),
        (InputTensor("protect", "INT32", (1, 2), [3, 3]), r"protect: got \[3, 3\)"),
        (InputTensor("protect", "INT32", (1, 2), [0, 6]), "<= 5"),
        (InputTensor("beam_width", "INT32", (1,), [1]), "beam_width: unknown input tensor"),
    ],
)
def test_bad_tensors_are_refused_by_name(tensor: InputTensor, part: str) -> None:
    tensors = [tensor] if tensor.name == "text_input" else [one("text_input", b"hello"), tensor]
    with pytest.raises(RequestError, match=part):
        parse_call(tensors, "", "engine-1")


def test_no_text_and_no_id_to_stop() -> None:
    with pytest.raises(RequestError, match="text_input: got no tensor"):
        parse()
    with pytest.raises(RequestError, match="stop: got a request without an id"):
        parse(one("stop", True), client_id="")


@st.composite
def input_tensors(draw: st.DrawFn) -> InputTensor:
    name = draw(st.sampled_from([*INPUTS, "unknown"]))
    dtype = draw(st.sampled_from(["STRING", "BOOL", "INT32", "UINT64", "FP32"]))
    shape = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=2)))
    value = {
        "STRING": st.binary(max_size=4),
        "BOOL": st.booleans(),
        "INT32": st.integers(-(2**31), 2**31 - 1),
        "UINT64": st.integers(0, 2**64 - 1),
        "FP32": st.floats(width=32),
    }[dtype]
    values = draw(st.lists(value, min_size=prod(shape), max_size=prod(shape)))
    return InputTensor(name, dtype, shape, values)


@given(st.lists(input_tensors(), max_size=5), st.text(max_size=3))
def test_any_tensors_give_a_call_or_a_request_error(tensors: list[InputTensor], client_id: str) -> None:
    try:
        call = parse_call(tensors, client_id, "engine-1")
    except RequestError as error:
        assert "expected" in str(error)
    else:
        assert isinstance(call, TurnCall | StopCall | EndCall | StatsCall)


EVENT = FinishEvent(
    "r", "stop", "END", TurnStats(1, 2, 3, 4, 5, 6, 7, 8, 2, 9, 10, KvStats(100, 400, 1, 2, 3, 4, 150)), -1.5
)


def test_finish_outputs_hold_what_was_asked_for() -> None:
    plain = {o.name: o.values for o in finish_outputs("", EVENT, OutputChoice(), {})}
    assert plain == {
        "text_output": (b"",), "kv_bytes": (100,), "kv_full_bytes": (400,), "kv_state_tokens": (1, 2, 3, 4),
    }  # fmt: skip
    everything = finish_outputs("ü", EVENT, OutputChoice(False, True, True, True, True), {"engine": {}})
    by_name = {o.name: o.values for o in everything}
    assert set(by_name) == set(OUTPUTS)
    assert by_name["text_output"] == ("ü".encode(),)
    assert by_name["finish_reason"] == (b"stop",) and by_name["stop_reason"] == (b"END",)
    assert by_name["cumulative_logprob"] == (-1.5,)
    assert by_name["kv_cache_hit_rate"] == (0.8,)
    stats = by_name["engine_stats"][0]
    assert isinstance(stats, bytes) and json.loads(stats)["turn"]["kv"]["peak_kv_bytes"] == 150


def test_pieces_and_reports() -> None:
    assert [o.name for o in text_outputs("a", -1.0, OutputChoice())] == ["text_output"]
    assert [o.name for o in text_outputs("a", -1.0, OutputChoice(cumulative_logprob=True))][1] == "cumulative_logprob"
    by_name = {o.name: o for o in stats_outputs(None, {"engine": {"idle": True}})}
    assert by_name["kv_bytes"].values == (0,) and by_name["kv_bytes"].dtype == "INT64"
    report = by_name["engine_stats"].values[0]
    assert isinstance(report, bytes) and json.loads(report) == {"engine": {"idle": True}, "conversation": None}
