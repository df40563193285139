"""Where checkpoints lie: a folder, a network share or an object store, by the URL that `fsspec` opens.

    <url>/<key>/<version>.ckv      key: SHA-256 of tenant and conversation id, so that names tell nothing

A version is written under a name of its own and made visible whole, then older ones are removed, so that a writer that
dies leaves the last good one. Who wrote or read a version and then finds another has been overtaken by another replica
(`is_superseded`), and what it would still write is dropped. One thread writes; what waits for it is bounded in bytes.
Objects hold what users said: files are made for their owner alone, and a bucket should be.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
import os
import secrets
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import fsspec

from runtime.checkpoint import Bytes
from runtime.errors import ConfigError, StoreUnavailableError

log = logging.getLogger(__name__)

SUFFIX = ".ckv"
_TEMPORARY = ".part"
# A reader that finds a version and then does not is beside a writer that has just replaced it.
_READ_ATTEMPTS = 5
SWEEP_EVERY = 64
# Versions remembered. One that is forgotten is read again when its conversation takes its next turn.
MAX_KNOWN = 100_000


@dataclass(frozen=True)
class StoreLimits:
    """max_queue_bytes: waiting to be written.   max_count, max_age_s: of what lies in the store; the oldest go."""

    max_queue_bytes: int = 256 << 20
    max_count: int = 10_000
    max_age_s: float = 7 * 86400.0


@dataclass
class StoreCounts:
    """Running sums.   failed: writes and deletions that the store refused.   swept: removed by age or count."""

    written: int = 0
    written_bytes: int = 0
    deleted: int = 0
    failed: int = 0
    swept: int = 0


@dataclass(frozen=True, eq=False)
class _Job:
    """make: pieces of the object to write; None: delete the key.   done: called however it ended."""

    key: str
    make: Callable[[], Sequence[Bytes]] | None
    num_bytes: int = 0
    done: tuple[Callable[[], None], ...] = ()


@dataclass
class _Queue:
    """Jobs by key, oldest first: the newest of a key replaces one that has not begun."""

    jobs: dict[str, _Job] = field(default_factory=dict)
    running: _Job | None = None
    closing: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def num_bytes(self) -> int:
        running = self.running.num_bytes if self.running is not None else 0
        return running + sum(job.num_bytes for job in self.jobs.values())

    def of(self, key: str) -> _Job | None:
        """The last job of a key that is not done."""
        job = self.jobs.get(key)
        if job is None and self.running is not None and self.running.key == key:
            job = self.running
        return job


class CheckpointStore:
    """Raises ConfigError for a URL that cannot be opened or written to."""

    def __init__(self, url: str, limits: StoreLimits = StoreLimits()) -> None:
        self.limits = limits
        self.counts = StoreCounts()
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
            self._root = str(root).rstrip("/")
            self._local = "file" in _protocols(self._fs)
            if self._local:
                os.makedirs(self._root, mode=0o700, exist_ok=True)
            else:
                self._fs.makedirs(self._root, exist_ok=True)
            self._try_out()
        except Exception as error:  # every file system has exceptions of its own
            raise ConfigError(
                f"checkpoint_url: {url!r} cannot be written to ({type(error).__name__}: {error}), expected a folder or "
                f"a URL that fsspec opens here, with its package installed; correct it, or leave it empty for none"
            ) from error
        self._queue = _Queue()
        self._known: OrderedDict[str, int] = OrderedDict()  # newest version written or read, by key
        self._thread = threading.Thread(target=self._run, name="commitkv-checkpoints", daemon=True)
        self._thread.start()

    def _try_out(self) -> None:
        path = f"{self._root}/{uuid.uuid4().hex}{_TEMPORARY}"
        self._fs.pipe_file(path, b"CommitKV")
        self._fs.rm_file(path)

    # Any thread

    def key(self, tenant: str, conversation_id: str) -> str:
        """Name of a conversation in the store."""
        name = f"{len(tenant)}:{tenant}{conversation_id}"
        return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes may wait; anything may where nothing else does."""
        with self._queue.changed:
            waiting = self._queue.num_bytes
            return waiting == 0 or waiting + num_bytes <= self.limits.max_queue_bytes

    def put(
        self,
        key: str,
        make: Callable[[], Sequence[Bytes]],
        num_bytes: int,
        done: Callable[[], None] | None = None,
    ) -> None:
        """Writes a new version soon. `make` gives its pieces, `done` is told when it or a newer one is written, or
        cannot be; both are called by the writer."""
        self._add(_Job(key, make, num_bytes, () if done is None else (done,)))

    def delete(self, key: str) -> None:
        """Removes all versions soon."""
        self._add(_Job(key, None))

    def _add(self, job: _Job) -> None:
        with self._queue.changed:
            older = self._queue.jobs.get(job.key)
            if older is not None:  # whoever waits for it waits for what takes its place
                job = replace(job, done=older.done + job.done)
            self._queue.jobs[job.key] = job
            self._queue.changed.notify_all()

    def get(self, key: str) -> Bytes | None:
        """The newest version, what still waits to be written included; None if there is none.

        Raises StoreUnavailableError where the store does not answer.
        """
        with self._queue.changed:
            job = self._queue.of(key)
        if job is not None:
            return None if job.make is None else b"".join(job.make())
        for _ in range(_READ_ATTEMPTS):
            try:
                versions = self._versions(key)
                if not versions:
                    return None
                content: bytes = self._fs.cat_file(self._path(key, versions[-1]))
                self._know(key, versions[-1])
            except FileNotFoundError:
                continue
            except Exception as error:
                raise _unavailable(error) from error
            return content
        raise _unavailable(FileNotFoundError(f"{key[:16]} is replaced faster than it can be read"))

    def exists(self, key: str) -> bool:
        """Whether `get` would give something. Raises StoreUnavailableError."""
        with self._queue.changed:
            job = self._queue.of(key)
        if job is not None:
            return job.make is not None
        try:
            return bool(self._versions(key))
        except Exception as error:
            raise _unavailable(error) from error

    def is_superseded(self, key: str) -> bool:
        """Whether the newest version is none that this store wrote or gave: another replica has gone on since.

        Raises StoreUnavailableError.
        """
        with self._queue.changed:
            known = self._known.get(key)  # before the look: what we write meanwhile must not seem another's
            if self._queue.of(key) is not None and known is None:
                return False
        try:
            versions = self._versions(key)
        except Exception as error:
            raise _unavailable(error) from error
        with self._queue.changed:
            return bool(versions) and versions[-1] not in (known, self._known.get(key))

    def _know(self, key: str, version: int | None) -> None:
        with self._queue.changed:
            self._known.pop(key, None)
            if version is not None:
                self._known[key] = version
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until nothing is left to write; False if time ran out."""
        queue = self._queue
        with queue.changed:
            return queue.changed.wait_for(lambda: not queue.jobs and queue.running is None, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Writes what waits and stops; gives up a store that takes longer. Nothing may be put afterwards."""
        with self._queue.changed:
            self._queue.closing = True
            self._queue.changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("%d checkpoints not written: the store took over %g s", len(self._queue.jobs), timeout_s)

    # The writer's thread

    def _run(self) -> None:
        queue = self._queue
        while True:
            with queue.changed:
                queue.changed.wait_for(lambda: bool(queue.jobs) or queue.closing)
                if not queue.jobs:
                    return
                job = queue.jobs.pop(next(iter(queue.jobs)))
                queue.running = job
            try:
                self._do(job)
            except Exception as error:  # a store that fails must not end the writer
                self.counts.failed += 1
                what = "deleted" if job.make is None else "written"
                log.warning("checkpoint %s not %s: %s: %s", job.key[:16], what, type(error).__name__, error)
            finally:
                with queue.changed:
                    queue.running = None
                    queue.changed.notify_all()
                for done in job.done:
                    done()

    def _do(self, job: _Job) -> None:
        versions = self._versions(job.key)
        if job.make is None:
            self._remove(self._path(job.key, version) for version in versions)
            self.counts.deleted += bool(versions)
            self._know(job.key, None)
            return
        known = self._known.get(job.key)
        if versions and known is not None and versions[-1] != known:
            log.warning("checkpoint %s not written: another replica has gone on with it", job.key[:16])
            return
        version = versions[-1] + 1 if versions else _first_version()
        path = self._path(job.key, version)
        pieces = job.make()
        self._know(job.key, version)
        try:
            if self._local:
                _write_file(path, pieces)
            else:
                self._fs.pipe_file(path, b"".join(pieces))  # an object store shows an object whole or not at all
        except BaseException:
            self._know(job.key, known)
            raise
        self._remove(self._path(job.key, old) for old in versions)
        self.counts.written_bytes += sum(map(len, pieces))
        self.counts.written += 1
        if self.counts.written % SWEEP_EVERY == 1:
            self._sweep(path)

    def _path(self, key: str, version: int) -> str:
        return f"{self._root}/{key}/{version:010d}{SUFFIX}"

    def _versions(self, key: str) -> list[int]:
        """Versions of a key, oldest first."""
        folder = f"{self._root}/{key}"
        try:
            self._fs.invalidate_cache(folder)
            names = self._fs.ls(folder, detail=False)
        except FileNotFoundError:
            return []
        stems = (str(name).rsplit("/", 1)[-1] for name in names)
        return sorted(int(stem.removesuffix(SUFFIX)) for stem in stems if stem.endswith(SUFFIX))

    def _remove(self, paths: Iterable[str]) -> None:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(path)
            if self._local:
                with contextlib.suppress(OSError):  # not empty: a newer version lies there
                    os.rmdir(os.path.dirname(path))

    def _sweep(self, newest: str) -> None:
        """Removes what is too old or too many. Ages count back from `newest`, by the store's own clock: a server whose
        clock jumps removes nothing for it."""
        self._fs.invalidate_cache(self._root)
        found: dict[str, Any] = self._fs.find(self._root, detail=True)
        times = {path: _modified(info) for path, info in found.items() if path.endswith((SUFFIX, _TEMPORARY))}
        now = times.get(newest, max(times.values(), default=0.0))
        by_age = sorted(times, key=lambda path: times[path])
        too_many = len(by_age) - self.limits.max_count
        gone = [
            path
            for i, path in enumerate(by_age)
            if path != newest and (i < too_many or now - times[path] > self.limits.max_age_s)
        ]
        self._remove(gone)
        self.counts.swept += len(gone)


def _first_version() -> int:
    """No round number: one that was ended and begun anew elsewhere must not look like what we knew of it."""
    return secrets.randbelow(10**9)


def _write_file(path: str, pieces: Sequence[Bytes]) -> None:
    """Appears whole under its name, once it is on the disk; readable by its owner alone."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    temporary = f"{path}.{uuid.uuid4().hex}{_TEMPORARY}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            for piece in pieces:
                stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _protocols(fs: Any) -> tuple[str, ...]:
    protocol = fs.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _modified(info: dict[str, Any]) -> float:
    """Seconds since 1970; file systems call it by different names."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "modified", "created"):
        value = info.get(name)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return datetime.datetime.fromisoformat(value).timestamp()
    return 0.0


def _unavailable(error: Exception) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"conversation_id: the checkpoint store does not answer ({type(error).__name__}: {error}), so nobody can say "
        f"whether the conversation goes on; try again later"
    )
