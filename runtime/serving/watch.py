"""Watches turns from arrival to end, for metrics and logs, without holding up those who run them.

`follow` and `refused` are called by the server's and the engine's threads and only note what happened and when; one
thread reports it, and reads the engine's own figures once in a while.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from runtime.request import ErrorEvent, Event, FinishEvent, Request, TextEvent
from runtime.serving import logs
from runtime.serving.metric_table import Reading, refusal_reason
from runtime.serving.metrics import Metrics

log = logging.getLogger(__name__)

REFRESH_S = 1.0


class Watch(Protocol):
    """What serving tells about the turns it handles."""

    def follow(self, request: Request, on_event: Callable[[Event], None]) -> Callable[[Event], None]:
        """The same listener, which also tells about the events of a turn that is being submitted."""
        ...

    def refused(self, request_id: str, conversation_id: str | None, error: Exception) -> None:
        """A request was answered with an error before it became a turn."""
        ...


class NoWatch:
    """Tells nobody."""

    def follow(self, request: Request, on_event: Callable[[Event], None]) -> Callable[[Event], None]:
        return on_event

    def refused(self, request_id: str, conversation_id: str | None, error: Exception) -> None:
        pass


@dataclass(frozen=True)
class _Arrived:
    request: Request


@dataclass(frozen=True)
class _Happened:
    request: Request
    event: Event
    at_ns: int


@dataclass(frozen=True)
class _Refused:
    request_id: str
    conversation_id: str | None
    error: Exception


_Note = _Arrived | _Happened | _Refused


class Reporter:
    """A Watch that reports to metrics and logs. metrics: None where the server exports none."""

    def __init__(
        self, metrics: Metrics | None, read: Callable[[], Reading], clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._metrics = metrics
        self._read = read
        self._clock_ns = clock_ns
        self._notes: queue.SimpleQueue[_Note | None] = queue.SimpleQueue()
        self._last_piece_ns: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="commitkv-report", daemon=True)
        self._thread.start()

    def follow(self, request: Request, on_event: Callable[[Event], None]) -> Callable[[Event], None]:
        self._notes.put(_Arrived(request))

        def told(event: Event) -> None:
            self._notes.put(_Happened(request, event, self._clock_ns()))
            on_event(event)

        return told

    def refused(self, request_id: str, conversation_id: str | None, error: Exception) -> None:
        self._notes.put(_Refused(request_id, conversation_id, error))

    def close(self) -> None:
        """Reports what is left and ends the thread; nothing is reported afterwards."""
        self._notes.put(None)
        self._thread.join()

    def _run(self) -> None:
        due = 0.0
        going_on = True
        while going_on:
            try:
                note = self._notes.get(timeout=max(0.0, due - time.monotonic()))
                going_on = note is not None
                if note is not None:
                    self._report(note)
            except queue.Empty:
                pass
            except Exception:
                log.exception("a turn could not be reported")
            if time.monotonic() >= due or not going_on:
                self._refresh()
                due = time.monotonic() + REFRESH_S

    def _refresh(self) -> None:
        if self._metrics is None:
            return
        try:
            self._metrics.read_engine(self._read())
        except Exception:
            log.exception("the engine's figures could not be reported")

    def _report(self, note: _Note) -> None:
        match note:
            case _Arrived(request):
                logs.turn_arrived(request)
            case _Refused(request_id, conversation_id, error):
                logs.refused(request_id, conversation_id, error, refusal_reason(error))
                if self._metrics is not None:
                    self._metrics.refused(error)
            case _Happened(request, TextEvent(), at_ns):
                self._piece(request.request_id, at_ns)
            case _Happened(request, event, _):
                self._last_piece_ns.pop(request.request_id, None)
                self._end(request, event)

    def _piece(self, request_id: str, at_ns: int) -> None:
        before = self._last_piece_ns.get(request_id)
        self._last_piece_ns[request_id] = at_ns
        if before is not None and self._metrics is not None:
            self._metrics.piece_gap((at_ns - before) / 1e9)

    def _end(self, request: Request, event: Event) -> None:
        if isinstance(event, FinishEvent):
            logs.turn_ended(request, event)
            if self._metrics is not None:
                self._metrics.turn_ended(event)
        elif isinstance(event, ErrorEvent):
            logs.turn_failed(request, event.error)
            if self._metrics is not None:
                self._metrics.turn_failed()
