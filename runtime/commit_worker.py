"""Draws the lines and writes the blocks of commits on a thread of its own, while steps of others run."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

# Of the thread: beside a busy thread it gets a quarter of a core. Much less, and commits would fall behind turns; much
# more, and steps would wait for it after all.
NICENESS = 5


class Task(Generic[T]):
    """Something that is done once: by the worker, or by whoever needs it before the worker has begun it."""

    def __init__(self, job: Callable[[], T], future: Future[T] | None = None) -> None:
        """future: of the worker; without one it is done at once."""
        self._job = job
        self._future = self._do() if future is None else future

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> T:
        """Raises what the job raised."""
        if self._future.cancel():
            self._future = self._do()
        return self._future.result()

    def _do(self) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(self._job())
        except Exception as error:
            future.set_exception(error)
        return future


class CommitWorker:
    """One thread; what it is given runs in order.   cpu_ns: time that it took, waiting for a core not counted."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "commitkv-commit", _give_way)
        self.cpu_ns = 0

    def run(self, job: Callable[[], T], told: Callable[[], None]) -> Task[T]:
        """told: called on the thread, after the task has its result or error."""
        future = self._pool.submit(self._timed, job)
        future.add_done_callback(lambda _: told())
        return Task(job, future)

    def _timed(self, job: Callable[[], T]) -> T:
        started = time.thread_time_ns()
        try:
            return job()
        finally:
            self.cpu_ns += time.thread_time_ns() - started

    def close(self) -> None:
        """After what it was given."""
        self._pool.shutdown()


def _give_way() -> None:
    """Linux keeps a niceness for every thread."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    except (OSError, AttributeError) as error:
        log.info("commits are written at the priority of steps: %s", error)
