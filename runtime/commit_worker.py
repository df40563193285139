"""Writes the blocks of commits on a thread of its own, while steps of others run."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from runtime.step import PublishResult

log = logging.getLogger(__name__)

# Of the thread: beside a busy thread it gets a quarter of a core. Much less, and commits would fall behind turns; much
# more, and steps would wait for it after all.
NICENESS = 5


@dataclass(frozen=True)
class Written:
    """cpu_ns: time that the writing took on its thread, waiting for a core not counted."""

    result: PublishResult
    cpu_ns: int


class CommitWorker:
    """One thread; what it is given runs in order."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "commitkv-commit", _give_way)

    def write(self, publish: Callable[[], PublishResult], done: Callable[[], None]) -> Future[Written]:
        """Runs `publish`.   done: called on the thread, after the future has its result or error."""
        future = self._pool.submit(_timed, publish)
        future.add_done_callback(lambda _: done())
        return future

    def close(self) -> None:
        """After what is being written."""
        self._pool.shutdown()


def _timed(publish: Callable[[], PublishResult]) -> Written:
    started = time.thread_time_ns()
    result = publish()
    return Written(result, time.thread_time_ns() - started)


def _give_way() -> None:
    """Linux keeps a niceness for every thread."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    except (OSError, AttributeError) as error:
        log.info("commits are written at the priority of steps: %s", error)
