"""Runs probes and commits on the device, between steps of rows, and settles them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from runtime.engine_parts import EngineParts
from runtime.errors import OutOfMemoryError
from runtime.figures import Figures
from runtime.keeper import Keeper
from runtime.maintenance import Maintenance
from runtime.probing import CommitWork, ProbeWork


class Upkeep:
    """The engine's thread calls it without the engine's `lock`, which is held for settling only."""

    def __init__(
        self,
        parts: EngineParts,
        maintenance: Maintenance,
        keeper: Keeper,
        figures: Figures,
        lock: threading.RLock,
        clock_ns: Callable[[], int],
    ) -> None:
        self._executor = parts.executor
        self._manager = parts.manager
        self._observer = parts.observer
        self._checkpoints = parts.checkpoints
        self._maintenance = maintenance
        self._keeper = keeper
        self._figures = figures
        self._lock = lock
        self._clock_ns = clock_ns

    def probe(self, work: ProbeWork, interrupted: Callable[[], bool]) -> None:
        """Re-reads a piece of a span; gives way to `interrupted` unless it is urgent."""
        started = self._clock_ns()
        done = False
        try:
            done = self._executor.probe(work.plan, _never if work.urgent else interrupted)
        finally:
            with self._lock:
                self._keeper.release(self._maintenance.settle_probe(work, done))
        self._figures.count_probe(self._clock_ns() - started, done)

    def commit(self, work: CommitWork) -> None:
        """Compresses what is staged. Without room to write to, somebody's cache goes, and it is tried again later."""
        started = self._clock_ns()
        line = self._executor.draw_line(work.plan)
        try:
            with self._lock:
                reservation = self._manager.reserve_publish(work.plan, line)
        except OutOfMemoryError:
            with self._lock:
                if not self._keeper.make_room():
                    self._maintenance.commit_failed()
            return
        try:
            result = self._executor.publish(reservation.plan)
        except BaseException:
            with self._lock:
                self._manager.cancel_commit(reservation)
            raise
        with self._lock:
            self._keeper.release(self._manager.settle_commit(reservation))
            handle, replaced = self._maintenance.committed(work.plan.handle)
            if replaced is not None:
                self._keeper.release(replaced)
            self._checkpoints.changed(self._keeper.held(handle))
            if self._observer is not None:
                self._observer.committed(handle, result)
        self._figures.count_commit(self._clock_ns() - started, result)


def _never() -> bool:
    return False
