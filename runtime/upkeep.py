"""Runs probes and commits on the device, between steps of rows, and settles them.

Where there is a worker, a commit's blocks are written while others run, and settled at a step boundary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from runtime.commit_worker import Written
from runtime.engine_parts import EngineParts
from runtime.errors import OutOfMemoryError
from runtime.figures import Figures
from runtime.keeper import Keeper
from runtime.maintenance import Maintenance
from runtime.probing import CommitWork, ProbeWork
from runtime.reservations import CommitReservation
from runtime.step import PublishResult


@dataclass(frozen=True, eq=False)
class _Writing:
    """A commit that the worker writes.   spent_ns: what was spent on it before."""

    reservation: CommitReservation
    future: Future[Written]
    spent_ns: int


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
        self._worker = parts.commit_worker
        self._maintenance = maintenance
        self._keeper = keeper
        self._figures = figures
        self._lock = lock
        self._clock_ns = clock_ns
        self._writing: _Writing | None = None
        self._failure: Exception | None = None  # of a commit that somebody else waited for
        self._manager.open_commit.finish = self._conclude

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

    def commit(self, work: CommitWork, written: Callable[[], None]) -> None:
        """Compresses what is staged. Without room to write to, somebody's cache goes, and it is tried again later.

        written: called by the worker, where there is one, once `finish` would not wait.
        """
        self.finish()
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
        if self._worker is not None:
            future = self._worker.write(self._executor.publishing(reservation.plan), written)
            self._writing = _Writing(reservation, future, self._clock_ns() - started)
            return
        with self._cancelled_on_error(reservation):
            result = self._executor.publish(reservation.plan)
        self._settle(reservation, result, self._clock_ns() - started)

    @property
    def is_writing(self) -> bool:
        """Whether a commit is being written, or waits to be settled."""
        return self._writing is not None

    def settle_written(self) -> None:
        """Settles a commit whose blocks are written; waits for none. Raises what made the last one fail."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if self._writing is not None and self._writing.future.done():
            self.finish()

    def finish(self) -> bool:
        """Waits for a commit that is being written, and settles it; False if there is none."""
        writing, self._writing = self._writing, None
        if writing is None:
            return False
        with self._cancelled_on_error(writing.reservation):
            written = writing.future.result()
        self._settle(writing.reservation, written.result, writing.spent_ns + written.cpu_ns)
        return True

    def _conclude(self) -> None:
        """`finish` for those who change the cache: a commit that failed is no commit, and must not stop them half way.

        The next step raises it.
        """
        try:
            self.finish()
        except Exception as error:
            self._failure = error

    def close(self) -> None:
        """Called when nobody steps any more."""
        self._conclude()
        if self._worker is not None:
            self._worker.close()

    @contextmanager
    def _cancelled_on_error(self, reservation: CommitReservation) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with self._lock:
                self._manager.cancel_commit(reservation)
            raise

    def _settle(self, reservation: CommitReservation, result: PublishResult, duration_ns: int) -> None:
        with self._lock:
            self._keeper.release(self._manager.settle_commit(reservation))
            handle, replaced = self._maintenance.committed(reservation.handle)
            if replaced is not None:
                self._keeper.release(replaced)
                self._figures.renewals += 1
            self._checkpoints.changed(self._keeper.held(handle))
            if self._observer is not None:
                self._observer.committed(handle, result)
        self._figures.count_commit(duration_ns, result)


def _never() -> bool:
    return False
