"""One request over an asyncio gRPC stream of its own, with the arrival time of every piece of text."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import grpc
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aio

from perf.client import tensor
from perf.server import MODEL_NAME

Status = Literal["ok", "left", "refused", "unreachable", "unanswered"]
NOTICE_S = 15.0  # in which a server notices that a client has left, on a busy machine too
_STATUS: Mapping[Any, Status] = {
    grpc.StatusCode.UNAVAILABLE: "unreachable",
    grpc.StatusCode.UNKNOWN: "unreachable",
    grpc.StatusCode.DEADLINE_EXCEEDED: "left",
}


@dataclass(frozen=True)
class Target:
    """Where requests go. headers: gRPC metadata of every stream, such as what a proxy hashes or a tenant.

    tls: encrypt, with the system's certificates. model: name on the server.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: bool = False
    model: str = MODEL_NAME


@dataclass(frozen=True)
class Patience:
    """timeout_s: longest wait for the whole answer.   leave_after_s: close the stream so long after sending.
    leave_after_pieces: close it once so many pieces of text have come.   deadline_s: gRPC's own, which travels with
    the request."""

    timeout_s: float = 600.0
    deadline_s: float | None = None
    leave_after_s: float | None = None
    leave_after_pieces: int | None = None


@dataclass(frozen=True)
class Answer:
    """sent_s, piece_s, end_s: seconds of the monotonic clock.

    ok: the last response came.   left: we closed the stream.   refused: an error was answered.
    unreachable: the connection failed.   unanswered: time ran out.
    stats, kv: what the last response said, empty without it.
    """

    status: Status
    error: str
    text: str
    sent_s: float
    piece_s: tuple[float, ...]
    end_s: float
    stats: Mapping[str, Any] = field(default_factory=dict)
    kv: Mapping[str, int] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        """Refused because the conversation's turn before still runs."""
        return self.status == "refused" and "still running a turn" in self.error

    @property
    def turn(self) -> Mapping[str, Any]:
        """The server's record of the turn, empty without one."""
        return dict(self.stats.get("turn") or {})


class Requests:
    """Sends requests to one target over one channel. An asynchronous context manager."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._client: Any = None

    async def __aenter__(self) -> Self:
        self._client = aio.InferenceServerClient(self.target.url, ssl=self.target.tls)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def ask(self, values: Mapping[str, Any], request_id: str = "", patience: Patience | None = None) -> Answer:
        """One request to its end or until `patience` is over. values: tensors by name, as values or ready made."""
        patience = patience or Patience()
        inputs = [v if isinstance(v, grpcclient.InferInput) else tensor(name, v) for name, v in values.items()]
        conversation = values.get("conversation_id")
        headers = dict(self.target.headers)
        if isinstance(conversation, str) and conversation.isascii() and conversation.isprintable():
            headers.setdefault("x-conversation-id", conversation)  # what a proxy in front of replicas hashes
        request = {"model_name": self.target.model, "inputs": inputs, "request_id": request_id}
        stream = self._client.stream_infer(_once(request), patience.deadline_s, headers)
        return await _Reading(stream, patience).run()

    async def ask_after_leaving(self, values: Mapping[str, Any], request_id: str, patience: Patience) -> Answer:
        """The turn after one that was left: until the server has noticed that, it says the conversation is busy, and
        a client asks again. Times are of the first try, so that the wait counts."""
        first_s = time.monotonic()
        while True:
            answer = await self.ask(values, request_id, patience)
            if not answer.busy or time.monotonic() - first_s > NOTICE_S:
                return replace(answer, sent_s=first_s)
            await asyncio.sleep(0.1)

    async def stats(self, conversation_id: str | None = None, timeout_s: float = 30.0) -> Answer:
        """The server's report; `stats` and `kv` of the answer hold it."""
        named = {} if conversation_id is None else {"conversation_id": conversation_id}
        return await self.ask({"stats": True, **named}, patience=Patience(timeout_s))

    async def stop(self, request_id: str) -> Answer:
        """Asks the server to cancel the request with that id."""
        return await self.ask({"stop": True}, request_id, Patience(30.0))

    async def end(self, conversation_id: str) -> Answer:
        """Frees a conversation."""
        return await self.ask({"conversation_end": True, "conversation_id": conversation_id}, patience=Patience(30.0))


async def _once(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request


class _Reading:
    """Reads one stream to its end."""

    def __init__(self, stream: Any, patience: Patience) -> None:
        self._stream = stream
        self._patience = patience
        self._pieces: list[str] = []
        self._times: list[float] = []
        self._last: grpcclient.InferResult | None = None
        self._left = False
        self._error = ""
        self._sent_s = time.monotonic()

    async def run(self) -> Answer:
        leaving = None
        if self._patience.leave_after_s is not None:
            leaving = asyncio.get_running_loop().call_later(self._patience.leave_after_s, self._leave)
        try:
            async with asyncio.timeout(self._patience.timeout_s):
                status = await self._read()
        except TimeoutError:
            status = "unanswered"
        except asyncio.CancelledError:
            if not self._left:
                raise
            status = "left"
        except grpc.aio.AioRpcError as error:
            # A deadline that passes while a request is being sent ends the call as an error inside gRPC.
            status = "left" if self._is_late() else _STATUS.get(error.code(), "refused")
            self._error = f"{error.code().name}: {error.details()}"
        finally:
            if leaving is not None:
                leaving.cancel()
            with contextlib.suppress(Exception):
                self._stream.cancel()
        return self._answer(status)

    def _is_late(self) -> bool:
        """Whether gRPC's deadline, if it was given one, has passed."""
        return self._patience.deadline_s is not None and time.monotonic() - self._sent_s >= self._patience.deadline_s

    def _leave(self) -> None:
        self._left = True
        self._stream.cancel()

    async def _read(self) -> Status:
        async for result, error in self._stream:
            if error is not None:
                self._error = str(error.message())
                return "refused"
            text = text_of(result, "text_output")
            if text:
                self._pieces.append(text)
                self._times.append(time.monotonic())
            self._last = result
            if result.get_response().parameters["triton_final_response"].bool_param:
                return "ok"
            if self._patience.leave_after_pieces == len(self._pieces):
                return "left"
        self._error = "the stream ended before the last response"
        return "left" if self._left else "unreachable"

    def _answer(self, status: Status) -> Answer:
        report = text_of(self._last, "engine_stats") if status == "ok" else ""
        return Answer(
            status=status,
            error=self._error,
            text="".join(self._pieces),
            sent_s=self._sent_s,
            piece_s=tuple(self._times),
            end_s=time.monotonic(),
            stats=json.loads(report) if report else {},
            kv=_kv(self._last) if status == "ok" else {},
        )


def text_of(result: Any, name: str) -> str:
    """A text output, "" where there is none."""
    array = None if result is None else result.as_numpy(name)
    return "" if array is None or not array.size else str(array.reshape(-1)[0].decode("utf-8"))


def _kv(result: Any) -> dict[str, int]:
    """kv_bytes and kv_full_bytes, of servers that report them."""
    arrays = {name: result.as_numpy(name) for name in ("kv_bytes", "kv_full_bytes")}
    return {name: int(array[0]) for name, array in arrays.items() if array is not None and array.size}


def turn_values(text: str, conversation_id: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """Tensors of a streamed turn that reports its figures; of `more`, values that are None are left out."""
    values: dict[str, Any] = {
        "text_input": text,
        "conversation_id": conversation_id,
        "streaming": True,
        "sampling_param_return_perf_metrics": True,
        "sampling_param_max_tokens": max_tokens,
    }
    return values | {name: value for name, value in more.items() if value is not None}


def problems(answers: Sequence[Answer]) -> list[str]:
    """Errors of answers that were neither complete nor left by us."""
    return [f"{answer.status}: {answer.error}" for answer in answers if answer.status not in ("ok", "left")]
