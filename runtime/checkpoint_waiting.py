"""Last events of turns that wait until the turn is written, so that no client was told what a crash can lose."""

from __future__ import annotations

import itertools
import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from runtime.request import Event

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Waiting:
    serial: int
    handle: int
    event: Event
    deadline_s: float


class WaitingEvents:
    """wait_s: longest wait, after which an event goes out all the same; 0: nothing waits.

    wake: lets an idle engine take its next step. Only `told_by`'s results are called by another thread.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._events: list[_Waiting] = []  # oldest first
        self._serials = itertools.count()
        self._written: queue.SimpleQueue[int] = queue.SimpleQueue()  # serials
        self.wake: Callable[[], None] = lambda: None

    def __bool__(self) -> bool:
        return bool(self._events)

    def hold(self, handle: int, event: Event) -> list[Event]:
        """Keeps the event of a conversation that is about to be copied out; gives it back if nothing waits here."""
        if not self._wait_s:
            return [event]
        self._events.append(_Waiting(next(self._serials), handle, event, time.monotonic() + self._wait_s))
        return []

    def told_by(self, handle: int) -> Callable[[], None] | None:
        """What the writer calls when the copy of a conversation that is made now is written; None if nobody waits."""
        serials = self._of(handle)
        return partial(self._tell, serials) if serials else None

    def _of(self, handle: int) -> list[int]:
        return [one.serial for one in self._events if one.handle == handle]

    def _tell(self, serials: list[int]) -> None:
        for serial in serials:
            self._written.put(serial)
        self.wake()

    def release(self, handle: int) -> None:
        """Nothing of this conversation will be written."""
        self._tell(self._of(handle))

    def take(self) -> list[Event]:
        """Events that need not wait any more, oldest first."""
        written: set[int] = set()
        while not self._written.empty():
            written.add(self._written.get())
        if not self._events:
            return []
        now_s = time.monotonic()
        for one in self._events:
            if one.serial not in written and one.deadline_s <= now_s:
                log.warning("request %s: told after %g s, not yet written", one.event.request_id, self._wait_s)
        ready = [one for one in self._events if one.serial in written or one.deadline_s <= now_s]
        self._events = [one for one in self._events if one not in ready]
        return [one.event for one in ready]
