"""What the model `tensorrt_llm` takes: the names and types of its input tensors, and the call that a request makes.

Names follow TensorRT-LLM's LLM-API Triton model. CommitKV's own: sampling_param_bad, return_log_probs, messages,
conversation_id, conversation_end, turn_id, system_prompt, protect, kv_policy, priority and stats. What goes back is in
`runtime.serving.responses`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from runtime.errors import ConfigError, RequestError
from runtime.request import Message, Request, SamplingParams
from runtime.serving.messages import parse_messages
from runtime.serving.tensors import Fields, InputSpec, InputTensor

MAX_ID_CHARS = 256
MAX_PRIORITY = 100
TENANT_PARAMETER = "commitkv_tenant"

INPUTS: Mapping[str, InputSpec] = {
    "text_input": InputSpec("STRING"),
    "streaming": InputSpec("BOOL"),
    "sampling_param_best_of": InputSpec("INT32"),
    "sampling_param_max_tokens": InputSpec("INT32"),
    "sampling_param_temperature": InputSpec("FP32"),
    "sampling_param_top_k": InputSpec("INT32"),
    "sampling_param_top_p": InputSpec("FP32"),
    "sampling_param_stop": InputSpec("STRING", "list"),
    "sampling_param_bad": InputSpec("STRING", "list"),
    "sampling_param_end_id": InputSpec("INT32"),
    "sampling_param_seed": InputSpec("UINT64"),
    "sampling_param_frequency_penalty": InputSpec("FP32"),
    "sampling_param_presence_penalty": InputSpec("FP32"),
    "sampling_param_exclude_input_from_output": InputSpec("BOOL"),
    "sampling_param_return_perf_metrics": InputSpec("BOOL"),
    "return_finish_reason": InputSpec("BOOL"),
    "return_stop_reason": InputSpec("BOOL"),
    "return_cumulative_logprob": InputSpec("BOOL"),
    "return_log_probs": InputSpec("BOOL"),
    "stop": InputSpec("BOOL"),
    "messages": InputSpec("STRING"),
    "conversation_id": InputSpec("STRING"),
    "conversation_end": InputSpec("BOOL"),
    "turn_id": InputSpec("STRING"),
    "system_prompt": InputSpec("STRING"),
    "protect": InputSpec("INT32", "pairs"),
    "kv_policy": InputSpec("STRING"),
    "priority": InputSpec("INT32"),
    "stats": InputSpec("BOOL"),
}


@dataclass(frozen=True)
class Origin:
    """Where a request comes from.

    engine_id: our id of it, unique.   client_id: Triton's request id, which the client chose; may be empty.
    parameters: the request's own parameters, forwarded headers among them.
    """

    engine_id: str
    client_id: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class OutputChoice:
    """Which outputs the client asked for, and whether the text comes in pieces.

    conversation_id: the id that the server drew for this conversation, to be told; "": the client chose one.
    """

    streaming: bool = False
    finish_reason: bool = False
    stop_reason: bool = False
    cumulative_logprob: bool = False
    perf_metrics: bool = False
    log_probs: bool = False
    conversation_id: str = ""


@dataclass(frozen=True)
class TurnCall:
    """Run one turn. new_conversation: draw an id for it."""

    request: Request
    choice: OutputChoice = field(default_factory=OutputChoice)
    new_conversation: bool = False


@dataclass(frozen=True)
class StopCall:
    """Cancel the tenant's running requests with the same Triton request id."""

    client_id: str
    tenant: str = ""


@dataclass(frozen=True)
class EndCall:
    """Free a conversation without running a turn."""

    conversation_id: str
    tenant: str = ""


@dataclass(frozen=True)
class StatsCall:
    """Report the engine's state, and a conversation's when one is named."""

    conversation_id: str | None
    tenant: str = ""


Call = TurnCall | StopCall | EndCall | StatsCall


def parse_call(tensors: Sequence[InputTensor], origin: Origin) -> Call:
    """What a request asks for. Raises RequestError that names the tensor, what it held and what was expected."""
    fields = Fields(tensors, INPUTS)
    tenant = parse_tenant(origin.parameters)
    if fields.flag("stop"):
        if not origin.client_id:
            raise RequestError(
                "stop: got a request without an id, expected the id of the request to cancel; set the request id"
            )
        return StopCall(origin.client_id, tenant)
    drawn = fields.text("conversation_id") == ""
    conversation_id = None if drawn else _identifier(fields, "conversation_id")
    if fields.flag("stats"):
        _check_named("stats", drawn)
        return StatsCall(conversation_id, tenant)
    has_prompt = bool(fields.text("text_input")) or fields.has("messages")
    if fields.flag("conversation_end") and not has_prompt:
        if conversation_id is None:
            raise RequestError(
                "conversation_end: got true without conversation_id, expected both; name the conversation"
            )
        return EndCall(conversation_id, tenant)
    return _turn_call(fields, origin, tenant, conversation_id, drawn)


def _turn_call(fields: Fields, origin: Origin, tenant: str, conversation_id: str | None, drawn: bool) -> TurnCall:
    text, messages = _prompt(fields)
    ends = fields.flag("conversation_end")
    if ends and conversation_id is None and not drawn:
        raise RequestError("conversation_end: got true without conversation_id, expected both; name the conversation")
    _check_best_of(fields)
    choice = _choice(fields)
    request = Request(
        request_id=origin.engine_id,
        text=text,
        sampling=_sampling(fields, choice),
        conversation_id=conversation_id,
        system_prompt=fields.text("system_prompt"),
        protect=_protect(fields, messages[-1].content if messages else text),
        policy=fields.text("kv_policy"),
        end_conversation=ends,
        exclude_input_from_output=fields.flag("sampling_param_exclude_input_from_output", default=True),
        messages=messages,
        tenant=tenant,
        priority=_priority(fields),
        turn_id=_turn_id(fields, named=conversation_id is not None, ends=ends),
    )
    return TurnCall(request, choice, new_conversation=drawn)


def check_tenant_parameter(name: str) -> None:
    """Raises ConfigError for a name that `trusted_parameters` cannot take."""
    if not re.fullmatch(rf"{TENANT_PARAMETER}(_[0-9a-z]+)?", name):
        raise ConfigError(
            f"model parameter tenant_parameter: got {name!r}, expected {TENANT_PARAMETER}, or that with an underscore "
            f"and a secret of small letters and digits behind it; correct config.pbtxt"
        )


def trusted_parameters(parameters: Mapping[str, object], name: str) -> Mapping[str, object]:
    """A request's parameters, with the tenant only where it came under `name`.

    Triton gives a client's parameters and the headers that a front end sets in one heap, and a client can write any
    parameter into its request. A name that only the front end knows, commitkv_tenant_ and a secret, tells them apart.
    """
    if name == TENANT_PARAMETER:
        return parameters
    return {
        TENANT_PARAMETER if _plain(key) == name else key: value
        for key, value in parameters.items()
        if _plain(key) != TENANT_PARAMETER
    }


def _plain(key: str) -> str:
    """Headers come in any case, and cannot carry the underscore everywhere."""
    return key.lower().replace("-", "_")


def parse_tenant(parameters: Mapping[str, object]) -> str:
    """The tenant that the front end named, '' for none. Raises RequestError, also where two names contradict."""
    named = {str(value) for key, value in parameters.items() if _plain(key) == TENANT_PARAMETER}
    if not named:
        return ""
    if len(named) > 1:
        raise RequestError(
            f"{TENANT_PARAMETER}: got {len(named)} different values, expected one, from the front end; "
            f"leave the parameter out of the request"
        )
    return _checked_id(TENANT_PARAMETER, named.pop())


def _check_named(what: str, drawn: bool) -> None:
    if drawn:
        raise RequestError(f"conversation_id: got '' with {what}, expected the id of a conversation; name it")


def _prompt(fields: Fields) -> tuple[str, tuple[Message, ...]]:
    """The text of the turn, or the whole chat."""
    text, chat = fields.text("text_input"), fields.text("messages")
    if chat is None:
        if not text:
            what = "no tensor" if text is None else "empty text"
            raise RequestError(f"text_input: got {what}, expected the prompt or the user's message; send some text")
        return text, ()
    for name in ("text_input", "system_prompt"):
        if fields.has(name):
            raise RequestError(
                f"{name}: got it together with messages, expected one of them; put the text into messages"
            )
    if not fields.flag("sampling_param_exclude_input_from_output", default=True):
        raise RequestError(
            "sampling_param_exclude_input_from_output: got false together with messages, expected true: a chat has no "
            "one input to repeat; leave it out"
        )
    return "", parse_messages(chat)


def _identifier(fields: Fields, name: str) -> str | None:
    text = fields.text(name)
    return None if text is None else _checked_id(name, text)


def _checked_id(name: str, text: str) -> str:
    if not text or len(text) > MAX_ID_CHARS or not text.isprintable():
        raise RequestError(
            f"{name}: got {text[:40]!r} ({len(text)} characters), expected 1 to {MAX_ID_CHARS} printable characters; "
            "choose another id"
        )
    return text


def _turn_id(fields: Fields, *, named: bool, ends: bool) -> str | None:
    turn_id = _identifier(fields, "turn_id")
    if turn_id is not None and (ends or not named):
        wrong = "with conversation_end" if ends else "without a conversation_id of yours"
        raise RequestError(
            f"turn_id: got it {wrong}, expected it in a conversation that you name and that goes on, where its answer "
            f"can be told again; {'end it by a request of its own' if ends else 'name the conversation'}"
        )
    return turn_id


def _priority(fields: Fields) -> int:
    priority = fields.whole("priority") or 0
    if abs(priority) > MAX_PRIORITY:
        raise RequestError(
            f"priority: got {priority}, expected -{MAX_PRIORITY} to {MAX_PRIORITY} (0 is usual); choose one of these"
        )
    return priority


def _protect(fields: Fields, text: str) -> tuple[tuple[int, int], ...]:
    """[start, end) ranges of characters of the text, or of the chat's newest message."""
    flat, num_chars = fields.wholes("protect"), len(text)
    ranges = tuple(zip(flat[::2], flat[1::2], strict=True))
    for start, end in ranges:
        if not 0 <= start < end <= num_chars:
            raise RequestError(
                f"protect: got [{start}, {end}), expected 0 <= start < end <= {num_chars}, the characters of "
                "text_input or of the newest message; correct the range"
            )
    return ranges


def _check_best_of(fields: Fields) -> None:
    best_of = fields.whole("sampling_param_best_of")
    if best_of not in (None, 1):
        raise RequestError(
            f"sampling_param_best_of: got {best_of}, expected 1: one answer is drawn; send several requests with "
            f"different seeds instead"
        )


def _choice(fields: Fields) -> OutputChoice:
    return OutputChoice(
        streaming=fields.flag("streaming"),
        finish_reason=fields.flag("return_finish_reason"),
        stop_reason=fields.flag("return_stop_reason"),
        cumulative_logprob=fields.flag("return_cumulative_logprob"),
        perf_metrics=fields.flag("sampling_param_return_perf_metrics"),
        log_probs=fields.flag("return_log_probs"),
    )


def _sampling(fields: Fields, choice: OutputChoice) -> SamplingParams:
    default = SamplingParams()
    stop, bad = fields.texts("sampling_param_stop"), fields.texts("sampling_param_bad")
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
            want_logprobs=choice.cumulative_logprob or choice.log_probs,
            bad=bad,
            end_id=fields.whole("sampling_param_end_id"),
        )
    except RequestError as error:
        raise RequestError(f"sampling_param_{error}") from error


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
