"""Runs probes and commits on the device, between steps of rows, and settles them.

A commit goes through three phases: its line is drawn, it gets room for what that keeps, its blocks are written; then it
is settled. Where there is a worker, it draws and writes while steps of others run; room is taken and tables change at
step boundaries. Each commit of a batch goes on by itself, so who needs one of the caches does not wait for the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from runtime.commit_worker import Task
from runtime.engine_parts import EngineParts
from runtime.errors import OutOfMemoryError
from runtime.figures import Figures
from runtime.keeper import Keeper
from runtime.maintenance import Maintenance
from runtime.probing import CommitWork, ProbeWork
from runtime.reservations import CommitReservation
from runtime.step import LinePlan, LineResult, PublishResult

T = TypeVar("T")


@dataclass(eq=False)
class _Commit:
    """One that is under way.   lines: of all caches that it is drawn with; its own is at `index`.

    reservation: once it has room.   writing: once it is written, or about to be.
    """

    plan: LinePlan
    lines: Task[tuple[LineResult, ...]]
    index: int = 0
    reservation: CommitReservation | None = None
    writing: Task[PublishResult] | None = None

    @property
    def is_drawn(self) -> bool:
        return self.writing is None and self.lines.done()

    @property
    def is_written(self) -> bool:
        return self.writing is not None and self.writing.done()


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
        self._open: dict[int, _Commit] = {}  # by handle of the cache
        self._failures: list[Exception] = []  # of commits, to be raised once nobody is half way through something
        self._lacks_room = False  # a commit found none, and no other is open that will give some back
        self._counted_ns = 0  # of the worker's time
        # Called by the worker once `advance` has something to do.
        self.told: Callable[[], None] = _nothing
        self._manager.open_commits.settle = self._conclude

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
        """Begins commits of what is staged; without a worker they are over when it returns.

        One that finds no room to write to is given up and tried again later. Somebody's cache goes for it, unless other
        commits are open: those give memory back.
        """
        started = self._clock_ns()
        if self._worker is None:
            self._draw(work.plans)
            self._complete(list(self._open.values()))
        else:
            for plan in work.plans:
                self._draw((plan,))
        self._figures.commit_ns += self._clock_ns() - started
        self._follow_up()

    @property
    def is_committing(self) -> bool:
        """Whether commits are under way."""
        return bool(self._open)

    def advance(self) -> None:
        """Brings commits a phase further whose line is drawn or whose blocks are written; waits for none.

        Raises what made commits fail, as `finish` does.
        """
        self._settle([commit for commit in self._open.values() if commit.is_written])
        self._reserve([commit for commit in self._open.values() if commit.is_drawn], self._start)
        self._follow_up()

    def finish(self) -> bool:
        """Waits for all commits and settles them; False if there are none."""
        commits = list(self._open.values())
        self._complete(commits)
        self._follow_up()
        return bool(commits)

    def close(self) -> None:
        """Called when nobody steps any more."""
        self._complete(list(self._open.values()))
        if self._worker is not None:
            self._worker.close()

    def _conclude(self, handle: int) -> None:
        """For those who change the cache: a commit that failed is no commit, and must not stop them half way.

        The next step raises it.
        """
        self._complete([self._open[handle]])

    def _complete(self, commits: list[_Commit]) -> None:
        """Waits for what the worker has begun, and does the rest here."""
        self._reserve([commit for commit in commits if commit.writing is None], Task)
        self._settle([commit for commit in commits if commit.writing is not None])

    def _follow_up(self) -> None:
        """What must not be done in the middle of something else."""
        if self._worker is not None:
            counted, self._counted_ns = self._counted_ns, self._worker.cpu_ns
            self._figures.commit_ns += self._counted_ns - counted
        lacks_room, self._lacks_room = self._lacks_room and not self._open, False
        if lacks_room:
            with self._lock:
                if not self._keeper.make_room():
                    self._maintenance.commit_failed()
        failures, self._failures = list(dict.fromkeys(self._failures)), []
        if len(failures) > 1:
            raise ExceptionGroup("commits failed", failures)
        if failures:
            raise failures[0]

    # The phases

    def _draw(self, plans: tuple[LinePlan, ...]) -> None:
        lines = self._start(self._executor.drawing(plans))
        for index, plan in enumerate(plans):
            self._manager.open_commits.begin(plan.handle)
            self._open[plan.handle] = _Commit(plan, lines, index)

    def _reserve(
        self, commits: Iterable[_Commit], start: Callable[[Callable[[], PublishResult]], Task[PublishResult]]
    ) -> None:
        """Waits for lines that are not drawn yet.   start: what makes a task of the writing."""
        drawn: list[tuple[_Commit, LineResult]] = []
        for commit in commits:
            with self._given_up_on_error(commit):
                drawn.append((commit, commit.lines.result()[commit.index]))
        with self._lock:
            for commit, line in drawn:
                with self._given_up_on_error(commit):
                    commit.reservation = self._manager.reserve_publish(commit.plan, line)
        for commit, line in drawn:
            if commit.reservation is not None:
                with self._given_up_on_error(commit):
                    commit.writing = start(self._executor.publishing(commit.reservation.plan, line))

    def _settle(self, commits: Iterable[_Commit]) -> None:
        """Waits for blocks that are not written yet."""
        written: list[tuple[_Commit, PublishResult]] = []
        for commit in commits:
            with self._given_up_on_error(commit):
                assert commit.writing is not None
                written.append((commit, commit.writing.result()))
        with self._lock:
            for commit, result in written:
                self._settle_one(commit, result)

    def _settle_one(self, commit: _Commit, result: PublishResult) -> None:
        assert commit.reservation is not None
        self._leave(commit)
        self._keeper.release(self._manager.settle_commit(commit.reservation))
        handle, replaced = self._maintenance.committed(commit.plan.handle)
        if replaced is not None:
            self._keeper.release(replaced)
            self._figures.renewals += 1
        self._checkpoints.changed(self._keeper.held(handle))
        if self._observer is not None:
            self._observer.committed(handle, result)
        self._figures.count_commit(result)

    def _start(self, job: Callable[[], T]) -> Task[T]:
        return Task(job) if self._worker is None else self._worker.run(job, self.told)

    @contextmanager
    def _given_up_on_error(self, commit: _Commit) -> Iterator[None]:
        """Of one commit; the others of its batch go on."""
        try:
            yield
        except BaseException as error:
            self._leave(commit)
            if commit.reservation is not None:
                with self._lock:
                    self._manager.cancel_commit(commit.reservation)
            if isinstance(error, OutOfMemoryError):
                self._lacks_room = not self._open
            elif isinstance(error, Exception):
                self._failures.append(error)
            else:
                raise

    def _leave(self, commit: _Commit) -> None:
        del self._open[commit.plan.handle]
        self._manager.open_commits.end(commit.plan.handle)


def _never() -> bool:
    return False


def _nothing() -> None:
    pass
