"""The turns in flight: from a server's requests to the engine loop, and from its events to responses.

Threads: the server's thread calls `handle`; the engine loop's thread only puts events on a queue, so that sending
never holds up a step; one thread sends; one asks, a few times a second, which clients have gone away.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from runtime.errors import (
    CommitKVError,
    ConversationBusyError,
    OutOfMemoryError,
    RequestError,
    ServerStoppingError,
    StoreUnavailableError,
    UnknownConversationError,
)
from runtime.request import ErrorEvent, Event, KvStats, Request, TextEvent
from runtime.serving.contract import EndCall, Origin, StatsCall, StopCall, TurnCall, parse_call
from runtime.serving.responses import (
    OutputTensor,
    Piece,
    empty_outputs,
    finish_outputs,
    stats_outputs,
    text_outputs,
)
from runtime.serving.tensors import InputTensor
from runtime.serving.watch import NoWatch, Watch

ErrorCode = Literal["INVALID_ARG", "NOT_FOUND", "ALREADY_EXISTS", "UNAVAILABLE", "CANCELLED", "INTERNAL"]
CANCEL_POLL_S = 0.05

_CODES: tuple[tuple[type[CommitKVError], ErrorCode], ...] = (
    (UnknownConversationError, "NOT_FOUND"),
    (ConversationBusyError, "ALREADY_EXISTS"),
    (RequestError, "INVALID_ARG"),
    (OutOfMemoryError, "UNAVAILABLE"),
    (ServerStoppingError, "UNAVAILABLE"),
    (StoreUnavailableError, "UNAVAILABLE"),
)


class Sink(Protocol):
    """Where one request's responses go. `final` (and `fail`) complete the request; nothing may follow."""

    def send(self, outputs: tuple[OutputTensor, ...], final: bool) -> None: ...

    def fail(self, code: ErrorCode, message: str) -> None: ...

    def is_cancelled(self) -> bool: ...


class Loop(Protocol):
    """The part of `runtime.loop.EngineLoop` that serving needs."""

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def end_conversation(self, conversation_id: str, tenant: str = "") -> None: ...

    def stats(self) -> Any: ...

    def kv_stats(self, conversation_id: str, tenant: str = "") -> KvStats: ...

    def close(self, grace_s: float) -> None: ...


class Ids(Protocol):
    """Draws and checks conversation ids."""

    def new_id(self, tenant: str) -> str:
        """An id that nobody can guess."""
        ...

    def check(self, tenant: str, conversation_id: str) -> None:
        """Raises RequestError for an id that the tenant cannot have."""
        ...


class RandomIds:
    """Random ids; clients may also choose their own."""

    def new_id(self, tenant: str) -> str:
        return secrets.token_urlsafe(16)

    def check(self, tenant: str, conversation_id: str) -> None:
        pass


def error_code(error: Exception) -> ErrorCode:
    """The server's code for one of our errors."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), "INTERNAL")


def process_stats() -> dict[str, int]:
    """Resident memory of this process now and at its peak, in bytes, from the kernel's own account."""
    fields = {"VmRSS": "rss_bytes", "VmHWM": "peak_rss_bytes"}
    lines = (line.split() for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return {fields[words[0][:-1]]: int(words[1]) * 1024 for words in lines if words[0][:-1] in fields}


@dataclass
class _Turn:
    """One request in flight. `lock` keeps the question for cancellation and the last response apart: a server may
    free a request with its last response, and asking about a freed one kills the server."""

    call: TurnCall
    client_id: str
    sink: Sink
    pieces: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    client_gone: bool = False
    answered: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, text: str, logprobs: Sequence[float]) -> None:
        """More of the answer, to be sent."""
        self.pieces.append(text)
        self.logprobs += logprobs

    def take(self, cumulative_logprob: float) -> Piece:
        """What has not been sent yet."""
        piece = Piece("".join(self.pieces), tuple(self.logprobs), cumulative_logprob)
        self.pieces.clear()
        self.logprobs.clear()
        return piece

    def finish(self, outputs: tuple[OutputTensor, ...]) -> None:
        """The last response."""
        with self.lock:
            self.answered = True
            self.sink.send(outputs, True)

    def fail(self, code: ErrorCode, message: str) -> None:
        """The last response, an error."""
        with self.lock:
            self.answered = True
            self.sink.fail(code, message)

    def is_meant(self, call: StopCall) -> bool:
        """Whether `call` cancels this turn: a tenant cannot stop another's."""
        return (self.client_id, self.call.request.tenant) == (call.client_id, call.tenant)

    def has_left(self) -> bool:
        """Whether the client has just left; False once the turn is answered or known to be left."""
        with self.lock:
            if self.answered or self.client_gone:
                return False
            self.client_gone = self.sink.is_cancelled()
            return self.client_gone


class Turns:
    """Owns every request from `handle` to its final response."""

    def __init__(
        self,
        loop: Loop,
        default_policy: str | None = None,
        log: Callable[[str], None] = print,
        ids: Ids | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._loop = loop
        self._ids = ids or RandomIds()
        self._reports = watch or NoWatch()
        self._default_policy = default_policy
        self._log = log
        self._numbers = itertools.count(1)
        self._turns: dict[str, _Turn] = {}
        self._lock = threading.Lock()
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._sender = threading.Thread(target=self._send_all, name="commitkv-send", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="commitkv-cancel", daemon=True)
        self._sender.start()
        self._watcher.start()

    def handle(
        self,
        tensors: Sequence[InputTensor],
        client_id: str,
        sink: Sink,
        parameters: Mapping[str, object] | None = None,
    ) -> None:
        """Take one request; its responses, or its one error, go to `sink`. Never raises for bad input.

        parameters: the request's own, forwarded headers among them.
        """
        engine_id = f"{client_id or 'turn'}#{next(self._numbers)}"
        try:
            call = parse_call(tensors, Origin(engine_id, client_id, parameters or {}))
            if isinstance(call, TurnCall):
                self._start(self._identified(call), client_id, sink)
            elif isinstance(call, StopCall):
                self._stop(call)
                sink.send(empty_outputs(), True)
            elif isinstance(call, EndCall):
                self._ids.check(call.tenant, call.conversation_id)
                self._loop.end_conversation(call.conversation_id, call.tenant)
                sink.send(empty_outputs(), True)
            else:
                sink.send(self._stats(call), True)
        except CommitKVError as error:
            self._reports.refused(engine_id, None, error)
            sink.fail(error_code(error), str(error))

    def _identified(self, call: TurnCall) -> TurnCall:
        """With a new id where the client asked for one, which the responses will tell; with a checked one else."""
        request = call.request
        if call.new_conversation:
            new_id = self._ids.new_id(request.tenant)
            choice = replace(call.choice, conversation_id=new_id)
            return replace(call, request=replace(request, conversation_id=new_id), choice=choice)
        if request.conversation_id is not None:
            self._ids.check(request.tenant, request.conversation_id)
        return call

    def _start(self, call: TurnCall, client_id: str, sink: Sink) -> None:
        # For a conversation that begins: one that goes on, here or from a checkpoint, keeps its own.
        call = replace(call, request=replace(call.request, default_policy=self._default_policy))
        engine_id = call.request.request_id
        turn = _Turn(call, client_id, sink)
        if not call.request.exclude_input_from_output:
            turn.pieces.append(call.request.text)
        with self._lock:
            self._turns[engine_id] = turn
        try:
            self._loop.submit(call.request, self._reports.follow(call.request, self._events.put))
        except Exception as error:
            self._forget(engine_id)
            self._reports.refused(engine_id, call.request.conversation_id, error)
            if isinstance(error, CommitKVError):
                turn.fail(error_code(error), str(error))
            else:  # ours, not the client's
                self._log(f"request {engine_id}: not taken, {error!r}")
                turn.fail("INTERNAL", f"internal error: {error!r}")
        else:
            if turn.client_gone:  # the engine did not know the turn yet when it was cancelled
                self._loop.cancel(engine_id)

    def _stop(self, call: StopCall) -> None:
        with self._lock:
            engine_ids = [key for key, turn in self._turns.items() if turn.is_meant(call)]
        if not engine_ids:
            raise UnknownConversationError(
                f"stop: no request with id {call.client_id!r} is running, expected the id of one that is; "
                f"it may have ended"
            )
        for engine_id in engine_ids:
            self._loop.cancel(engine_id)

    def _stats(self, call: StatsCall) -> tuple[OutputTensor, ...]:
        if call.conversation_id is None:
            return stats_outputs(None, self._engine_stats())
        self._ids.check(call.tenant, call.conversation_id)
        return stats_outputs(self._loop.kv_stats(call.conversation_id, call.tenant), self._engine_stats())

    def _engine_stats(self) -> Mapping[str, object]:
        stats = self._loop.stats()
        assert is_dataclass(stats) and not isinstance(stats, type)
        return {"engine": asdict(stats), "process": process_stats()}

    def _send_all(self) -> None:
        while (event := self._events.get()) is not None:
            with self._lock:
                turn = self._turns.get(event.request_id)
            if turn is None:
                continue
            try:
                self._send(turn, event)
            except Exception as error:  # the connection, not us: the turn must not live on unread
                self._log(f"request {event.request_id}: response not sent ({error}); its turn is cancelled")
                self._forget(event.request_id)
                self._loop.cancel(event.request_id)
                with contextlib.suppress(Exception):
                    turn.fail("INTERNAL", f"a response could not be sent: {error}")

    def _send(self, turn: _Turn, event: Event) -> None:
        choice = turn.call.choice
        if isinstance(event, TextEvent):
            turn.add(event.text, event.logprobs)
            if choice.streaming and not turn.client_gone:
                turn.sink.send(text_outputs(turn.take(event.cumulative_logprob), choice), False)
            return
        self._forget(event.request_id)
        if isinstance(event, ErrorEvent):
            turn.fail(error_code(event.error), str(event.error))
        elif turn.client_gone:
            turn.fail("CANCELLED", "request cancelled by the client")
        else:
            stats = self._engine_stats() if choice.perf_metrics else {}
            turn.add("", event.logprobs)
            turn.finish(finish_outputs(turn.take(event.cumulative_logprob), event, choice, stats))

    def _forget(self, engine_id: str) -> None:
        with self._lock:
            self._turns.pop(engine_id, None)

    def _watch(self) -> None:
        while not self._closing.wait(CANCEL_POLL_S):
            with self._lock:
                turns = list(self._turns.items())
            for engine_id, turn in turns:
                if turn.has_left():
                    self._loop.cancel(engine_id)

    def close(self, grace_s: float) -> None:
        """Running turns get `grace_s` to finish, then they are cancelled; every request is answered."""
        self._loop.close(grace_s)
        self._events.put(None)
        self._sender.join()
        self._closing.set()
        self._watcher.join()
        for turn in self._turns.values():
            turn.fail("UNAVAILABLE", "the server stopped before this turn ended; ask again later")
        self._turns.clear()
