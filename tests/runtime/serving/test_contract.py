from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ConfigError, RequestError
from runtime.request import MAX_BAD_WORDS, Message
from runtime.serving.contract import (
    INPUTS,
    EndCall,
    Origin,
    OutputChoice,
    StatsCall,
    StopCall,
    TurnCall,
    check_tenant_parameter,
    parse_call,
    trusted_parameters,
)
from runtime.serving.tensors import InputTensor, Value

CHAT = b'[{"role": "user", "content": "hi"}]'


def one(name: str, value: Value) -> InputTensor:
    return InputTensor(name, INPUTS[name].dtype, (1,), [value])


def parse(*tensors: InputTensor, client_id: str = "c", **parameters: object) -> object:
    return parse_call(tensors, Origin("engine-1", client_id, parameters))


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
        InputTensor("sampling_param_bad", "STRING", (2,), [b"darn", "bl\u00f6d".encode()]),
        one("sampling_param_end_id", 7),
        one("sampling_param_best_of", 1),
        one("sampling_param_seed", 2**64 - 1),
        one("sampling_param_frequency_penalty", 0.1),
        one("sampling_param_presence_penalty", -0.1),
        one("sampling_param_exclude_input_from_output", False),
        one("sampling_param_return_perf_metrics", True),
        one("return_finish_reason", True),
        one("return_stop_reason", True),
        one("return_cumulative_logprob", True),
        one("return_log_probs", True),
        one("conversation_id", "gespräch".encode()),
        one("conversation_end", True),
        one("system_prompt", b"be brief"),
        InputTensor("protect", "INT32", (2, 2), [0, 2, 3, 5]),
        one("kv_policy", b"full"),
        one("priority", -3),
    )
    request, sampling = call.request, call.request.sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.seed) == (7, 40, 2**64 - 1)
    assert (sampling.temperature, sampling.top_p, sampling.stop) == (0.5, 0.9, ("\n\n", "ende"))
    assert sampling.want_logprobs and sampling.bad == ("darn", "bl\u00f6d") and sampling.end_id == 7
    assert request.priority == -3 and request.tenant == "" and request.request_id == "engine-1"
    assert request.conversation_id == "gespräch" and request.end_conversation
    assert request.protect == ((0, 2), (3, 5))
    assert request.policy == "full" and request.system_prompt == "be brief"
    assert not request.exclude_input_from_output
    assert call.choice == OutputChoice(True, True, True, True, True, True)


def test_a_turn_with_a_name() -> None:
    assert turn(one("conversation_id", b"a"), one("turn_id", b"first")).request.turn_id == "first"
    assert turn(one("conversation_id", b"a")).request.turn_id is None


@pytest.mark.parametrize(
    ("tensors", "part"),
    [
        ([one("turn_id", b"first")], "turn_id: got it without a conversation_id of yours"),
        ([one("turn_id", b"first"), one("conversation_id", b"")], "turn_id: got it without a conversation_id of yours"),
        (
            [one("turn_id", b"first"), one("conversation_id", b"a"), one("conversation_end", True)],
            "turn_id: got it with conversation_end",
        ),
        ([one("turn_id", b"a\nb"), one("conversation_id", b"a")], "turn_id: got 'a"),
    ],
)
def test_a_name_that_is_of_no_use_is_refused(tensors: list[InputTensor], part: str) -> None:
    with pytest.raises(RequestError, match=part):
        turn(*tensors)


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
        (one("conversation_id", b"x" * 257), "conversation_id: .*257 characters"),
        (one("conversation_id", b"a\nb"), "conversation_id"),
        (one("conversation_end", True), "conversation_end"),
        (InputTensor("protect", "INT32", (4,), [0, 1, 2, 3]), r"protect: got shape \[4\]"),
        (InputTensor("protect", "INT32", (1, 2), [-1, 3]), r"protect: got \[-1, 3\)"),
        (InputTensor("protect", "INT32", (1, 2), [3, 3]), r"protect: got \[3, 3\)"),
        (InputTensor("protect", "INT32", (1, 2), [0, 6]), "<= 5"),
        (one("sampling_param_bad", b""), "sampling_param_bad: got an empty text"),
        (one("sampling_param_bad", "a\ufffd".encode()), r"sampling_param_bad: got U\+FFFD"),
        (InputTensor("sampling_param_bad", "STRING", (1,), [b"x" * 257]), "sampling_param_bad: got 1 words"),
        (InputTensor("sampling_param_bad", "STRING", (129,), [b"x"] * 129), f"at most {MAX_BAD_WORDS} of at most"),
        (one("sampling_param_best_of", 2), "sampling_param_best_of: got 2, expected 1"),
        (one("priority", 101), "priority: got 101, expected -100 to 100"),
        (InputTensor("messages", "STRING", (2,), [CHAT, CHAT]), r"messages: got shape \[2\]"),
        (one("messages", CHAT), "text_input: got it together with messages"),
        (InputTensor("beam_width", "INT32", (1,), [1]), "beam_width: unknown input tensor"),
    ],
)
def test_bad_tensors_are_refused_by_name(tensor: InputTensor, part: str) -> None:
    tensors = [tensor] if tensor.name == "text_input" else [one("text_input", b"hello"), tensor]
    with pytest.raises(RequestError, match=part):
        parse_call(tensors, Origin("engine-1"))


def test_one_tensor_twice_is_refused() -> None:
    with pytest.raises(RequestError, match="streaming: got the tensor twice"):
        turn(one("streaming", True), one("streaming", False))


def test_a_whole_chat_takes_the_place_of_the_text() -> None:
    alone = parse(one("messages", CHAT))
    named = parse(one("messages", CHAT), one("conversation_id", b"c"), one("conversation_end", True))
    assert isinstance(alone, TurnCall) and isinstance(named, TurnCall)
    assert alone.request.messages == named.request.messages == (Message("user", "hi"),)
    assert alone.request.text == "" and alone.request.conversation_id is None
    assert named.request.conversation_id == "c" and named.request.end_conversation
    protected = parse(one("messages", CHAT), InputTensor("protect", "INT32", (1, 2), [0, 2]))
    assert isinstance(protected, TurnCall) and protected.request.protect == ((0, 2),)


@pytest.mark.parametrize(
    ("tensor", "part"),
    [
        (one("system_prompt", b"be brief"), "system_prompt: got it together with messages"),
        (InputTensor("protect", "INT32", (1, 2), [0, 3]), r"protect: got \[0, 3\), .* <= 2, .* newest message"),
        (one("sampling_param_exclude_input_from_output", False), "exclude_input_from_output: got false together"),
    ],
)
def test_what_does_not_go_with_a_whole_chat(tensor: InputTensor, part: str) -> None:
    with pytest.raises(RequestError, match=part):
        parse(one("messages", CHAT), tensor)


def test_an_empty_conversation_id_asks_for_a_new_one() -> None:
    call = turn(one("conversation_id", b""))
    assert call.new_conversation and call.request.conversation_id is None
    assert not turn().new_conversation
    assert turn(one("conversation_id", b""), one("conversation_end", True)).new_conversation
    with pytest.raises(RequestError, match="conversation_id: got '' with stats"):
        parse(one("conversation_id", b""), one("stats", True))
    with pytest.raises(RequestError, match="conversation_end: got true without conversation_id"):
        parse(one("conversation_id", b""), one("conversation_end", True))


@pytest.mark.parametrize("name", ["commitkv_tenant", "commitkv-tenant", "Commitkv-Tenant"])
def test_the_tenant_is_the_front_ends_word(name: str) -> None:
    calls = [
        parse(one("text_input", b"x"), **{name: "acme", "other": 3}),
        parse(one("stats", True), **{name: "acme"}),
        parse(one("stop", True), **{name: "acme"}),
        parse(one("conversation_end", True), one("conversation_id", b"a"), **{name: "acme"}),
    ]
    assert isinstance(calls[0], TurnCall) and calls[0].request.tenant == "acme"
    assert calls[1:] == [StatsCall(None, "acme"), StopCall("c", "acme"), EndCall("a", "acme")]


@pytest.mark.parametrize("value", ["", "a\nb", "x" * 257])
def test_a_tenant_is_printable(value: str) -> None:
    with pytest.raises(RequestError, match="commitkv_tenant: got"):
        parse(one("text_input", b"x"), commitkv_tenant=value)


def test_a_client_cannot_add_a_second_tenant() -> None:
    with pytest.raises(RequestError, match="commitkv_tenant: got 2 different values"):
        parse(one("text_input", b"x"), **{"commitkv-tenant": "mine", "commitkv_tenant": "yours"})


def test_a_secret_name_tells_the_front_end_from_the_client() -> None:
    name = "commitkv_tenant_5ecret"
    check_tenant_parameter(name)
    client = {"commitkv_tenant": "acme", "Commitkv-Tenant": "acme", "other": 1}
    assert trusted_parameters(client, name) == {"other": 1}
    assert trusted_parameters({**client, "commitkv-tenant-5ecret": "b"}, name) == {"commitkv_tenant": "b", "other": 1}
    assert trusted_parameters(client, "commitkv_tenant") == client


@pytest.mark.parametrize("name", ["", "tenant", "commitkv_tenant_", "commitkv_tenant_a-b", "commitkv_tenantx"])
def test_names_that_would_not_be_forwarded(name: str) -> None:
    with pytest.raises(ConfigError, match="model parameter tenant_parameter: got"):
        check_tenant_parameter(name)


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
        call = parse_call(tensors, Origin("engine-1", client_id))
    except RequestError as error:
        assert "expected" in str(error)
    else:
        assert isinstance(call, TurnCall | StopCall | EndCall | StatsCall)
