"""The store: versions appear whole, the newest wins, failures end nothing, and what it holds is bounded."""

from __future__ import annotations

import os
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from runtime.checkpoint_store import CheckpointStore, StoreLimits
from runtime.errors import ConfigError, StoreUnavailableError

WAIT_S = 20.0


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "kept") if request.param == "folder" else f"memory://{uuid.uuid4().hex}/kept"


@pytest.fixture
def store(url: str) -> Iterator[CheckpointStore]:
    opened = CheckpointStore(url)
    yield opened
    opened.close(WAIT_S)


def put(store: CheckpointStore, key: str, content: bytes) -> None:
    store.put(key, lambda: [content[:2], content[2:]], len(content))


def objects(url: str) -> list[str]:
    fs, root = fsspec.core.url_to_fs(url)
    return sorted(fs.find(root))


def test_the_newest_version_is_read_and_older_ones_go(store: CheckpointStore, url: str) -> None:
    key = store.key("tenant", "ada")
    assert store.get(key) is None and not store.exists(key)
    for content in (b"first", b"second", b"third"):
        put(store, key, content)
        assert store.flush(WAIT_S)
        assert store.get(key) == content and store.exists(key)
    [left] = objects(url)
    folder, _, name = left.rpartition("/")
    assert folder.endswith(key) and name.endswith(".ckv") and len(name) == len("0000000003.ckv")
    assert (store.counts.written, store.counts.written_bytes) == (3, 16)


def test_another_replica_reads_it_and_goes_on_counting(store: CheckpointStore, url: str) -> None:
    key = store.key("", "ada")
    put(store, key, b"ours")
    assert store.flush(WAIT_S)
    other = CheckpointStore(url)
    assert other.get(key) == b"ours"
    put(other, key, b"theirs")
    other.close(WAIT_S)
    assert store.get(key) == b"theirs"


def test_who_has_been_overtaken_knows_it_and_writes_no_more(store: CheckpointStore, url: str) -> None:
    key = store.key("", "ada")
    put(store, key, b"ours")
    assert not store.is_superseded(key), "it waits to be written"
    assert store.flush(WAIT_S) and not store.is_superseded(key)
    other = CheckpointStore(url)
    assert other.is_superseded(key) and other.get(key) == b"ours" and not other.is_superseded(key)
    put(other, key, b"theirs")
    assert other.flush(WAIT_S) and store.is_superseded(key) and not other.is_superseded(key)
    put(store, key, b"ours, late")
    assert store.flush(WAIT_S) and other.get(key) == b"theirs"
    assert store.get(key) == b"theirs" and not store.is_superseded(key), "who has read it may go on"
    put(store, key, b"ours again")
    assert store.flush(WAIT_S) and other.is_superseded(key)
    other.close(WAIT_S)


def test_whoever_waits_is_told_however_it_ends(store: CheckpointStore, caplog: pytest.LogCaptureFixture) -> None:
    held, told = threading.Event(), list[str]()

    def fail() -> list[bytes]:
        raise OSError("disk full")

    store.put("busy", lambda: [b"x" * held.wait(WAIT_S)], 1)
    store.put("key", lambda: [b"old"], 3, lambda: told.append("replaced"))
    store.put("key", lambda: [b"new"], 3, lambda: told.append("written"))
    store.put("broken", fail, 3, lambda: told.append("failed"))
    assert told == []
    held.set()
    assert store.flush(WAIT_S)
    store.close(WAIT_S)
    assert told == ["replaced", "written", "failed"] and "disk full" in caplog.text


def test_deleting_leaves_nothing(store: CheckpointStore, url: str) -> None:
    key = store.key("", "ada")
    put(store, key, b"text")
    assert store.flush(WAIT_S)
    store.delete(key)
    assert store.get(key) is None and not store.exists(key)  # at once, for those who ask this replica
    assert store.flush(WAIT_S)
    assert objects(url) == [] and store.counts.deleted == 1


def test_what_waits_to_be_written_is_read_from_the_queue(store: CheckpointStore) -> None:
    held = threading.Event()

    def slow() -> list[bytes]:
        held.wait(WAIT_S)
        return [b"slow"]

    try:
        store.put("first", slow, 4)
        put(store, "second", b"old")
        put(store, "second", b"new")
        assert store.get("second") == b"new"
        assert not store.flush(0.05)
    finally:
        held.set()
    assert store.flush(WAIT_S)
    assert store.counts.written == 2, "the older of two that waited is never written"


def test_the_queue_is_bounded_but_takes_anything_when_empty(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), StoreLimits(max_queue_bytes=10))
    held = threading.Event()
    assert store.has_room(1000)
    store.put("key", lambda: [b"x" * held.wait(WAIT_S)], 8)
    try:
        assert store.has_room(2) and not store.has_room(3)
    finally:
        held.set()
    assert store.flush(WAIT_S) and store.has_room(1000)
    store.close(WAIT_S)


def test_ids_of_two_tenants_never_meet(store: CheckpointStore) -> None:
    pairs = [("", "ab"), ("a", "b"), ("ab", ""), ("1:a", "b"), ("", "1:ab"), ("\udcff", "é")]
    assert len({store.key(*pair) for pair in pairs}) == len(pairs)


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path / "kept"))
    put(store, "key", b"secret")
    store.close(WAIT_S)
    [path] = (tmp_path / "kept").glob("*/*")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_half_written_file_is_no_version(tmp_path: Path) -> None:
    """What a writer leaves that was killed: the last good version stays the newest."""
    store = CheckpointStore(str(tmp_path))
    put(store, "key", b"good")
    assert store.flush(WAIT_S)
    (tmp_path / "key" / "0000000002.ckv.abc.part").write_bytes(b"ha")
    assert store.get("key") == b"good"
    put(store, "key", b"next")
    assert store.flush(WAIT_S) and store.get("key") == b"next"
    store.close(WAIT_S)


def test_a_store_that_refuses_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(str(tmp_path))

    def fail() -> list[bytes]:
        raise OSError("disk full")

    store.put("key", fail, 1)
    assert store.flush(WAIT_S)
    assert store.counts.failed == 1 and "disk full" in caplog.text
    put(store, "key", b"later")
    assert store.flush(WAIT_S) and store.get("key") == b"later"
    store.close(WAIT_S)


def test_a_store_that_does_not_answer_is_said_so(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(store._fs, "ls", fail)
    with pytest.raises(StoreUnavailableError, match="no route"):
        store.get("key")
    with pytest.raises(StoreUnavailableError, match="try again later"):
        store.exists("key")


@pytest.mark.parametrize("url", ["/proc/none/here", "nosuch://bucket/kept"])
def test_a_url_that_cannot_be_written_to_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="checkpoint_url"):
        CheckpointStore(url)


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), StoreLimits(max_count=3))
    now = time.time()
    for number in range(6):
        folder = tmp_path / f"old-{number}"
        folder.mkdir()
        (folder / "0000000001.ckv").write_bytes(b"old")
        os.utime(folder / "0000000001.ckv", (now - 600 + number, now - 600 + number))
    put(store, "new", b"new")
    assert store.flush(WAIT_S)
    assert sorted(path.parent.name for path in tmp_path.glob("*/*.ckv")) == ["new", "old-4", "old-5"]
    assert store.counts.swept == 4
    store.close(WAIT_S)


def test_ages_are_told_by_the_store_not_by_our_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(str(tmp_path), StoreLimits(max_age_s=3600.0))
    now = time.time()
    for name, age in (("stale", 4000.0), ("fresh", 3000.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0000000001.ckv").write_bytes(b"old")
        os.utime(tmp_path / name / "0000000001.ckv", (now - age, now - age))
    monkeypatch.setattr(time, "time", lambda: now + 1e9)  # our clock jumps thirty years ahead
    put(store, "new", b"new")
    assert store.flush(WAIT_S)
    assert {path.parent.name for path in tmp_path.glob("*/*.ckv")} == {"new", "fresh"}
    store.close(WAIT_S)


def test_readers_beside_a_writer_always_find_a_whole_version(tmp_path: Path) -> None:
    url = str(tmp_path)
    store = CheckpointStore(url)
    key = store.key("", "busy")
    put(store, key, b"0" * 1000)
    assert store.flush(WAIT_S)
    reader, stop, seen = CheckpointStore(url), threading.Event(), set[bytes]()

    def read() -> None:
        while not stop.is_set():
            content = reader.get(key)
            assert content is not None and len(set(content)) == 1 and len(content) == 1000
            seen.add(bytes(content[:1]))

    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            read()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    for number in range(60):
        put(store, key, b"%d" % (number % 10) * 1000)
        assert store.flush(WAIT_S)
    stop.set()
    thread.join()
    reader.close(WAIT_S)
    store.close(WAIT_S)
    assert not failures and len(seen) > 1
