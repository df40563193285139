"""Building native code: cache, damage, missing or failing compilers, builds at the same time."""

from __future__ import annotations

import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plugins import native_build
from plugins.native_build import Library, Unit

HAVE_COMPILER = native_build.find_compiler() is not None
needs_compiler = pytest.mark.skipif(not HAVE_COMPILER, reason="needs a C++ compiler")


def source(
    folder: Path, text: str = 'extern "C" __attribute__((visibility("default"))) int two() { return 2; }'
) -> Path:
    path = folder / "two.cpp"
    path.write_text(text)
    return path


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@needs_compiler
def test_builds_once_and_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    library, cache = Library("two", (Unit(source(tmp_path)),)), tmp_path / "cache"
    first = native_build.load(library, cache)
    assert first is not None and first.two() == 2
    made = list(cache.iterdir())
    assert len(made) == 1, "only the finished library stays behind"
    stamp = made[0].stat().st_mtime_ns
    again = native_build.load(library, cache)
    assert again is not None and made[0].stat().st_mtime_ns == stamp
    assert lines(caplog) == []


@needs_compiler
def test_name_follows_sources_headers_and_flags(tmp_path: Path) -> None:
    compiler = native_build.find_compiler()
    assert compiler is not None
    header = tmp_path / "two.hpp"
    header.write_text("// one")
    unit = Unit(source(tmp_path))
    base = Library("two", (unit,), (header,))
    names = {native_build.content_hash(base, compiler)}
    names.add(native_build.content_hash(Library("two", (unit,), (header,), ("-g",)), compiler))
    names.add(native_build.content_hash(Library("two", (Unit(unit.source, ("-DX",)),), (header,)), compiler))
    header.write_text("// two")
    names.add(native_build.content_hash(base, compiler))
    source(tmp_path, "int three() { return 3; }")
    names.add(native_build.content_hash(base, compiler))
    assert len(names) == 5


@needs_compiler
def test_damaged_cache_is_built_again(tmp_path: Path) -> None:
    library, cache = Library("two", (Unit(source(tmp_path)),)), tmp_path / "cache"
    compiler = native_build.find_compiler()
    assert compiler is not None
    cache.mkdir()
    (cache / f"two-{native_build.content_hash(library, compiler)}.so").write_bytes(b"half a file")
    loaded = native_build.load(library, cache)
    assert loaded is not None and loaded.two() == 2


@needs_compiler
def test_builds_at_the_same_time(tmp_path: Path) -> None:
    library, cache = Library("two", (Unit(source(tmp_path)),)), tmp_path / "cache"
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: native_build.load(library, cache), range(4)))
    assert all(lib is not None and lib.two() == 2 for lib in loaded)
    assert len(list(cache.iterdir())) == 1


@needs_compiler
def test_optional_units_are_left_out(tmp_path: Path) -> None:
    unknown = Unit(source(tmp_path), ("-mno-such-instruction-set",), optional=True)
    loaded = native_build.load(Library("two", (Unit(source(tmp_path)), unknown)), tmp_path / "cache")
    assert loaded is not None and loaded.two() == 2


@needs_compiler
def test_a_failing_build_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    library, cache = Library("two", (Unit(source(tmp_path, "int two( { return 2; }")),)), tmp_path / "cache"
    assert native_build.load(library, cache) is None
    (line,) = lines(caplog)
    assert "two: native build failed" in line and "error" in line and "torch form" in line
    assert list(cache.iterdir()) == []


def test_no_compiler_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native_build.load(Library("two", (Unit(source(tmp_path)),)), tmp_path / "cache") is None
    (line,) = lines(caplog)
    assert "no C++ compiler found (g++, c++, clang++)" in line and "torch form" in line


def test_a_compiler_that_cannot_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = Library("two", (Unit(source(tmp_path)),))
    assert native_build.load(library, tmp_path / "cache", str(tmp_path / "missing")) is None
    assert len(lines(caplog)) == 1


@needs_compiler
def test_a_cache_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert native_build.load(Library("two", (Unit(source(tmp_path)),)), blocked / "cache") is None
    assert len(lines(caplog)) == 1


def test_first_compiler_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("clang++", "c++"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native_build.find_compiler() == str(tmp_path / "c++")


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native_build.default_cache_dir() == tmp_path / "commitkv"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert native_build.default_cache_dir() == Path(os.path.expanduser("~")) / ".cache" / "commitkv"
