"""Runs an engine in a thread of its own and hands each turn's events to whoever asked for it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from runtime.checkpoint_hook import CheckpointFigures
from runtime.engine import Engine
from runtime.errors import CommitKVError, ServerStoppingError
from runtime.figures import EngineStats
from runtime.heap import Heap
from runtime.request import ErrorEvent, Event, FinishEvent, KvStats, Request

log = logging.getLogger(__name__)

# An idle loop wakes this often to notice that it should stop.
IDLE_WAIT_S = 0.2
POLL_S = 0.01
# What a stop may spend on checkpoints that are not written yet.
CLOSE_S = 20.0
# So many failed steps with none between them that worked: it is not the turns, the device is broken.
MAX_FAILED_STEPS = 5


class EngineLoop:
    """Thread-safe front of an engine. `on_event` is called from the loop's thread and must not block.

    on_death: called once if the loop cannot go on, after every running turn was answered with an error.
    """

    def __init__(self, engine: Engine, on_death: Callable[[], None] | None = None) -> None:
        self._engine = engine
        self._on_death = on_death
        self._listeners: dict[str, Callable[[Event], None]] = {}
        self._lock = threading.Lock()
        self._accepting = True
        self._stopping = False
        self._dead = False
        self._thread = threading.Thread(target=self._run, name="commitkv-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        """Queues a turn. Raises CommitKVError, calling nothing, if it can never run."""
        revival = self._engine.prepare(request)
        with self._lock:
            if self._dead:
                raise ServerStoppingError("the engine has failed and takes no turns; send it to another server")
            if not self._accepting:
                raise ServerStoppingError("the server is stopping and takes no new turns; send it to another one")
            self._engine.submit(request, revival)
            # The loop's thread cannot deliver before this: it takes the same lock.
            self._listeners[request.request_id] = on_event

    def cancel(self, request_id: str) -> None:
        """Undoes a turn; its FinishEvent says 'cancelled'."""
        self._engine.cancel(request_id)

    def end_conversation(self, conversation_id: str, tenant: str = "") -> None:
        """Frees a conversation of `tenant`. Raises UnknownConversationError."""
        self._engine.end_conversation(conversation_id, tenant)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def checkpoint_figures(self) -> CheckpointFigures:
        return self._engine.checkpoint_figures()

    @property
    def is_alive(self) -> bool:
        """Whether the loop runs; False after `close` or when it could not go on."""
        return self._thread.is_alive() and not self._dead

    def kv_stats(self, conversation_id: str, tenant: str = "") -> KvStats:
        """Memory of one conversation of `tenant`. Raises UnknownConversationError."""
        return self._engine.kv_stats(conversation_id, tenant)

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no turn, probe or commit is left to do; False if time ran out."""
        deadline = time.monotonic() + timeout_s
        while not self._engine.stats().idle:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def close(self, grace_s: float) -> None:
        """Takes no new turns, lets running ones finish for `grace_s`, then cancels the rest and stops."""
        with self._lock:
            self._accepting = False
        deadline = time.monotonic() + grace_s
        while self._engine.has_turns() and self.is_alive and time.monotonic() < deadline:
            time.sleep(POLL_S)
        with self._lock:
            left = list(self._listeners)
        for request_id in left:
            self._engine.cancel(request_id)
        while self._engine.has_turns() and self.is_alive:
            time.sleep(POLL_S)
        self._stopping = True
        self._thread.join()
        self._engine.close(CLOSE_S)

    def _run(self) -> None:
        try:
            self._run_steps()
        except BaseException as error:
            log.critical("the engine's loop cannot go on", exc_info=True)
            self._die(error)

    def _die(self, error: BaseException) -> None:
        with self._lock:
            self._dead = True
            listeners, self._listeners = self._listeners, {}
        for request_id, listener in listeners.items():
            with contextlib.suppress(Exception):
                listener(ErrorEvent(request_id, CommitKVError(f"the engine has failed for good: {error!r}")))
        if self._on_death is not None:
            self._on_death()

    def _run_steps(self) -> None:
        num_failed, heap = 0, Heap()
        while not self._stopping:
            try:
                events, worked = self._engine.step()
                num_failed = 0 if worked else num_failed
            except Exception as error:
                num_failed += 1
                if num_failed >= MAX_FAILED_STEPS:
                    raise
                log.exception("a step failed; its turns are refused and their conversations rolled back")
                events = self._engine.abort(CommitKVError(f"the engine failed while running this turn: {error!r}"))
                worked = True
            for event in events:
                self._deliver(event)
            heap.trim_when_due()
            if not worked:
                self._engine.wait_for_work(IDLE_WAIT_S)

    def _deliver(self, event: Event) -> None:
        with self._lock:
            last = isinstance(event, FinishEvent | ErrorEvent)
            find = self._listeners.pop if last else self._listeners.get
            listener = find(event.request_id, None)
        if listener is None:
            return
        try:
            listener(event)
        except Exception:
            log.exception("a listener failed; its turn is cancelled")
            self._engine.cancel(event.request_id)
