"""A small typed client of the model `tensorrt_llm`: one conversation over gRPC streaming.

One bidirectional stream per turn: a stream left open after its last answer would hold up a server that stops.
"""

from __future__ import annotations

import contextlib
import json
import queue
import string
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import quote

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from perf.server import MODEL_NAME
from runtime.errors import CommitKVError, RequestError

STREAM_ERROR_WAIT_S = 5.0
TENANT_PARAMETER = "commitkv_tenant"
CONVERSATION_HEADER = "x-conversation-id"

_NUMPY: Mapping[str, Any] = {
    "BYTES": np.object_,
    "BOOL": np.bool_,
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
}
_DTYPES: Mapping[str, str] = {
    "text_input": "BYTES",
    "streaming": "BOOL",
    "sampling_param_max_tokens": "INT32",
    "sampling_param_temperature": "FP32",
    "sampling_param_top_k": "INT32",
    "sampling_param_top_p": "FP32",
    "sampling_param_stop": "BYTES",
    "sampling_param_bad": "BYTES",
    "sampling_param_end_id": "INT32",
    "sampling_param_seed": "UINT64",
    "sampling_param_frequency_penalty": "FP32",
    "sampling_param_presence_penalty": "FP32",
    "sampling_param_return_perf_metrics": "BOOL",
    "return_finish_reason": "BOOL",
    "return_stop_reason": "BOOL",
    "return_cumulative_logprob": "BOOL",
    "return_log_probs": "BOOL",
    "sampling_param_exclude_input_from_output": "BOOL",
    "messages": "BYTES",
    "priority": "INT32",
    "stop": "BOOL",
    "conversation_id": "BYTES",
    "conversation_end": "BOOL",
    "turn_id": "BYTES",
    "system_prompt": "BYTES",
    "protect": "INT32",
    "kv_policy": "BYTES",
    "stats": "BOOL",
}


class TurnError(CommitKVError):
    """The server answered a turn with an error; the message is the server's."""


class ServerUnreachableError(CommitKVError):
    """Nobody answers at the address."""


@dataclass(frozen=True)
class KvState:
    """What one conversation holds, in token equivalents and bytes."""

    kv_bytes: int
    kv_full_bytes: int
    active: int
    staged: int
    committed: int
    evicted: int

    @property
    def share(self) -> float:
        """kv_bytes as a share of the full cache's."""
        return self.kv_bytes / self.kv_full_bytes if self.kv_full_bytes else 1.0


@dataclass(frozen=True)
class TurnResult:
    """piece_times_s: arrival of each piece of text, seconds after the turn was sent.

    stats: {"engine", "process", "turn"} as the server's `engine_stats` reports them.
    log_probs: one per generated token, if they were asked for.
    recomputed_tokens: of earlier turns, computed again, and `note`: why.
    """

    text: str
    pieces: tuple[str, ...]
    piece_times_s: tuple[float, ...]
    finish_reason: str
    stop_reason: str
    kv: KvState
    stats: Mapping[str, Any]
    total_s: float
    cumulative_logprob: float | None = None
    log_probs: tuple[float, ...] = ()
    recomputed_tokens: int = 0
    note: str = ""

    @property
    def generated_tokens(self) -> int:
        return int(self.stats["turn"]["generated_tokens"])

    @property
    def decode_ms(self) -> float:
        """Server time from the first token of the answer to its last."""
        return float(self.stats["turn"]["last_token_ns"] - self.stats["turn"]["first_token_ns"]) / 1e6

    @property
    def ms_per_token(self) -> float | None:
        """Decode time per token; None for an answer of one token."""
        return self.decode_ms / (self.generated_tokens - 1) if self.generated_tokens > 1 else None


@dataclass(frozen=True)
class TurnOptions:
    """Greedy by default. bad: texts that never appear. logprob: ask for log-probabilities, per token and their sum.

    turn_id: a name, so that the turn can be sent again after a broken connection without being taken twice; "": none.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()
    seed: int | None = None
    protect: tuple[tuple[int, int], ...] = ()
    end: bool = False
    logprob: bool = False
    priority: int = 0
    turn_id: str = ""
    timeout_s: float = 600.0


class _ConversationId(grpcclient.InferInput):  # type: ignore[misc]
    """A tensor that remembers what it says, for the proxy's header."""

    content = ""


def tensor(name: str, values: Any, dtype: str | None = None) -> grpcclient.InferInput:
    """One input tensor of the contract; text becomes UTF-8 bytes, a single value gets shape [1]."""
    dtype = dtype or _DTYPES[name]
    rows = [values] if isinstance(values, str | bytes | bool | int | float) else list(values)
    try:
        if dtype == "BYTES":
            rows = [row.encode("utf-8") if isinstance(row, str) else row for row in rows]
    except UnicodeEncodeError as error:
        raise RequestError(f"{name}: got text with undecodable bytes ({error.reason}); send valid UTF-8") from error
    if dtype in ("INT32", "UINT64"):
        _check_range(name, rows, _NUMPY[dtype])
    array = np.array(rows, dtype=_NUMPY[dtype])
    made = (_ConversationId if name == "conversation_id" else grpcclient.InferInput)(name, list(array.shape), dtype)
    made.set_data_from_numpy(array)
    if name == "conversation_id" and isinstance(values, str):
        made.content = values
    return made


def _check_range(name: str, rows: Sequence[Any], kind: Any) -> None:
    """numpy would wrap a whole number that does not fit."""
    limits = np.iinfo(kind)
    for value in (x for row in rows for x in (row if isinstance(row, list | tuple) else (row,))):
        if not limits.min <= value <= limits.max:
            raise RequestError(f"{name}: got {value}, expected {limits.min} to {limits.max}; pass another number")


def proxy_headers(inputs: Sequence[grpcclient.InferInput]) -> dict[str, str]:
    """The header by which a proxy finds the conversation's replica: its id, percent-encoded where it is not ASCII."""
    ids = [made.content for made in inputs if isinstance(made, _ConversationId) and made.content.isprintable()]
    return {CONVERSATION_HEADER: quote(ids[0], safe=string.printable)} if ids and ids[0] else {}


def infer(
    url: str,
    inputs: Sequence[grpcclient.InferInput],
    request_id: str = "",
    timeout_s: float = 600.0,
    on_response: Callable[[Any], None] | None = None,
    tenant: str = "",
) -> list[Any]:
    """All responses of one request over a stream of its own.

    tenant: whose conversations it is about, where no front end says it.
    Leaving by an exception (Ctrl-C, or one from `on_response`) cancels the request on the server.
    Raises TurnError with the server's text, or ServerUnreachableError.
    """
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    responses: list[Any] = []
    done = False
    client = grpcclient.InferenceServerClient(url)
    try:
        client.start_stream(lambda result, error: answers.put((result, error)), headers=proxy_headers(inputs))
        try:
            parameters = {TENANT_PARAMETER: tenant} if tenant else None
            client.async_stream_infer(MODEL_NAME, list(inputs), request_id=request_id, parameters=parameters)
        except InferenceServerException as broken:  # the stream broke before, and the callback is told why
            try:
                answers.put(answers.get(timeout=STREAM_ERROR_WAIT_S))
            except queue.Empty:
                answers.put((None, broken))
        deadline = time.monotonic() + timeout_s
        while not done:
            try:
                result, error = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TurnError(f"turn: no answer within {timeout_s:g} s; it was cancelled, ask for less") from None
            if error is not None:
                done = True
                raise _client_error(url, error)
            responses.append(result)
            if on_response is not None:
                on_response(result)
            done = bool(result.get_response().parameters["triton_final_response"].bool_param)
    finally:
        with contextlib.suppress(Exception):
            client.stop_stream(cancel_requests=not done)
        client.close()
    return responses


def _client_error(url: str, error: InferenceServerException) -> CommitKVError:
    status, message = str(error.status() or ""), str(error.message())
    if "UNAVAILABLE" in status and ("connect" in message.lower() or "socket" in message.lower()):
        return ServerUnreachableError(f"server: nobody answers at {url}; start one with `make serve` or pass --url")
    return TurnError(message)


@dataclass
class Chat:
    """One conversation on the server at `url` (host:port of its gRPC endpoint).

    conversation_id: empty to let the server draw one; it stands here after the first turn.
    """

    url: str
    conversation_id: str
    policy: str | None = None
    system_prompt: str | None = None
    tenant: str = ""
    _turns: int = field(default=0, init=False, repr=False)

    def turn(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        options: TurnOptions | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> TurnResult:
        """Run one turn; `on_text` sees each piece as it arrives. Raises TurnError, ServerUnreachableError.

        prompt: the user's new message, or the whole chat as [{"role": ..., "content": ...}, ...].
        """
        options = options or TurnOptions()
        pieces: list[str] = []
        times: list[float] = []
        log_probs: list[float] = []
        begin = time.monotonic()

        def on_response(result: Any) -> None:
            piece = _text(result, "text_output")
            if options.logprob:
                log_probs.extend(result.as_numpy("output_log_probs").tolist())
            if piece:
                pieces.append(piece)
                times.append(time.monotonic() - begin)
                if on_text is not None:
                    on_text(piece)

        request_id = f"{self.conversation_id}/{self._turns}"
        inputs = self._inputs(prompt, options)
        last = infer(self.url, inputs, request_id, options.timeout_s, on_response, self.tenant)[-1]
        self._turns += 1
        self.conversation_id = self.conversation_id or _text(last, "conversation_id")
        return TurnResult(
            text="".join(pieces),
            pieces=tuple(pieces),
            piece_times_s=tuple(times),
            finish_reason=_text(last, "finish_reason"),
            stop_reason=_text(last, "stop_reason"),
            kv=_kv(last),
            stats=json.loads(_text(last, "engine_stats")),
            total_s=time.monotonic() - begin,
            cumulative_logprob=float(last.as_numpy("cumulative_logprob")[0]) if options.logprob else None,
            log_probs=tuple(log_probs),
            recomputed_tokens=int(last.as_numpy("kv_recomputed_tokens")[0]),
            note=_text(last, "kv_note"),
        )

    def _inputs(self, prompt: str | Sequence[Mapping[str, str]], options: TurnOptions) -> list[grpcclient.InferInput]:
        values: dict[str, Any] = {
            **({"text_input": prompt} if isinstance(prompt, str) else {"messages": json.dumps(list(prompt))}),
            "conversation_id": self.conversation_id,
            "streaming": True,
            "return_finish_reason": True,
            "return_stop_reason": True,
            "sampling_param_return_perf_metrics": True,
            "sampling_param_max_tokens": options.max_tokens,
            "sampling_param_temperature": options.temperature,
            "sampling_param_top_k": options.top_k,
            "sampling_param_top_p": options.top_p,
        }
        if self._turns == 0 and self.policy:
            values["kv_policy"] = self.policy
        if self._turns == 0 and self.system_prompt:
            values["system_prompt"] = self.system_prompt
        optional = {
            "sampling_param_stop": options.stop,
            "sampling_param_bad": options.bad,
            "protect": options.protect,
            "conversation_end": options.end,
            "return_cumulative_logprob": options.logprob,
            "return_log_probs": options.logprob,
            "priority": options.priority,
            "turn_id": options.turn_id,
        }
        values |= {name: value for name, value in optional.items() if value}
        if options.seed is not None:
            values["sampling_param_seed"] = options.seed
        return [tensor(name, value) for name, value in values.items()]

    def state(self) -> tuple[KvState, Mapping[str, Any]]:
        """The conversation's KV now, and the server's {"engine", "process", "conversation"} report."""
        inputs = [tensor("stats", True), tensor("conversation_id", self.conversation_id)]
        [answer] = infer(self.url, inputs, tenant=self.tenant)
        return _kv(answer), json.loads(_text(answer, "engine_stats"))

    def server_stats(self) -> Mapping[str, Any]:
        """The server's {"engine", "process"} report."""
        return engine_stats(self.url)

    def wait_idle(self, timeout_s: float) -> float:
        """Wait until the engine has no work left (probes and commits included); returns the seconds it took."""
        return wait_idle(self.url, timeout_s)

    def end(self) -> None:
        """Free the conversation on the server; the next turn starts a new one."""
        inputs = [tensor("conversation_end", True), tensor("conversation_id", self.conversation_id)]
        infer(self.url, inputs, tenant=self.tenant)
        self._turns = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(CommitKVError):
            self.end()


def engine_stats(url: str) -> Mapping[str, Any]:
    """The server's {"engine", "process"} report."""
    [answer] = infer(url, [tensor("stats", True)])
    return dict(json.loads(_text(answer, "engine_stats")))


def wait_idle(url: str, timeout_s: float, poll_s: float = 0.1) -> float:
    """Wait until the engine has no work left, `timeout_s` at most; returns the seconds it took."""
    begin = time.monotonic()
    while time.monotonic() - begin < timeout_s and not engine_stats(url)["engine"]["idle"]:
        time.sleep(poll_s)
    return time.monotonic() - begin


def server_version(url: str) -> str:
    """Version of the Triton server. Raises ServerUnreachableError."""
    client = grpcclient.InferenceServerClient(url)
    try:
        return str(client.get_server_metadata().version)
    except InferenceServerException as error:
        raise _client_error(url, error) from error
    finally:
        client.close()


def _text(result: Any, name: str) -> str:
    array = result.as_numpy(name)
    return "" if array is None or not array.size else str(array.reshape(-1)[0].decode("utf-8"))


def _kv(result: Any) -> KvState:
    states = [int(x) for x in result.as_numpy("kv_state_tokens")]
    return KvState(int(result.as_numpy("kv_bytes")[0]), int(result.as_numpy("kv_full_bytes")[0]), *states)
