"""Compiles C++ sources at first use into a shared library and loads it; cached by content hash.

Nothing here is specific to one operation: a caller names its translation units with their flags and gets a
`ctypes.CDLL`, or None where the machine has no working C++17 compiler, after one line in the log that says why.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

LOG = logging.getLogger("commitkv.native")
COMPILERS = ("g++", "c++", "clang++")
COMMON_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra")
# Helpers that one unit leaves out; and GCC's own vector headers read what they call undefined values.
QUIET_FLAGS = ("-Wno-unused-function", "-Wno-maybe-uninitialized", "-Wno-uninitialized")
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Unit:
    """One translation unit. `optional`: left out when this compiler does not know its flags."""

    source: Path
    flags: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True)
class Library:
    """What to build. `headers` are hashed with the sources; `flags` go to every compilation and to the link."""

    name: str
    units: tuple[Unit, ...]
    headers: tuple[Path, ...] = ()
    flags: tuple[str, ...] = ()


class BuildError(Exception):
    """The compiler refused, took too long, or could not be started; the message is its first complaint."""


def default_cache_dir() -> Path:
    """`commitkv` in the user's cache folder (XDG base directories)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "commitkv"


def find_compiler() -> str | None:
    """Path of the first C++ compiler on PATH, or None."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    return None


def load(library: Library, cache_dir: Path | None = None, compiler: str | None = None) -> ctypes.CDLL | None:
    """The library, built if no build of the same content is cached in `cache_dir` (default: the user's cache).

    Returns None, after one warning in the log, when there is no compiler or the build fails; callers then use another
    form of the operation. Builds at the same time in several processes do not disturb each other.
    """
    chosen = compiler or find_compiler()
    if chosen is None:
        LOG.warning("%s: no C++ compiler found (%s); the slower torch form is used", library.name, ", ".join(COMPILERS))
        return None
    try:
        path = build(library, cache_dir or default_cache_dir(), chosen)
        return ctypes.CDLL(str(path))
    except (BuildError, OSError) as error:
        LOG.warning("%s: native build failed (%s); the slower torch form is used", library.name, error)
        return None


def build(library: Library, cache_dir: Path, compiler: str) -> Path:
    """Path of the shared library in `cache_dir`; compiled there unless it exists and can be loaded.

    Raises BuildError when the compiler fails, OSError when the folder cannot be written.
    """
    final = library_path(library, cache_dir, compiler)
    if final.exists() and _loads(final):
        return final
    cache_dir.mkdir(parents=True, exist_ok=True)
    LOG.info("%s: compiling with %s into %s (once)", library.name, compiler, cache_dir)
    with tempfile.TemporaryDirectory(prefix=f"{library.name}-", dir=cache_dir) as scratch:
        made = Path(scratch) / "library.so"
        with ThreadPoolExecutor(max_workers=min(len(library.units), os.cpu_count() or 1)) as pool:
            jobs = [pool.submit(_compile, library, unit, Path(scratch) / f"{i}.o", compiler)
                    for i, unit in enumerate(library.units)]  # fmt: skip
            objects = [path for job in jobs if (path := job.result()) is not None]
        _run([compiler, "-shared", "-pthread", *library.flags, *map(str, objects), "-o", str(made)])
        os.replace(made, final)  # readers see no file or the whole file
    return final


def library_path(library: Library, cache_dir: Path, compiler: str) -> Path:
    """Where `build` puts the library."""
    return cache_dir / f"{library.name}-{content_hash(library, compiler)}.so"


def content_hash(library: Library, compiler: str) -> str:
    """Hash over sources, headers, flags, compiler version and processor family."""
    version = _run([compiler, "--version"])
    digest = hashlib.sha256()
    for part in (version, platform.machine(), *COMMON_FLAGS, *QUIET_FLAGS, *library.flags):
        digest.update(part.encode() + b"\0")
    for unit in library.units:
        digest.update(" ".join((unit.source.name, str(unit.optional), *unit.flags)).encode() + b"\0")
        digest.update(unit.source.read_bytes() + b"\0")
    for header in library.headers:
        digest.update(header.name.encode() + b"\0" + header.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _compile(library: Library, unit: Unit, target: Path, compiler: str) -> Path | None:
    """The object file, or None for an optional unit that does not compile."""
    command = [compiler, *COMMON_FLAGS, *QUIET_FLAGS, *library.flags, *unit.flags]
    try:
        _run([*command, "-c", str(unit.source), "-o", str(target)])
    except BuildError as error:
        if not unit.optional:
            raise
        LOG.info("%s: left out %s %s: %s", library.name, unit.source.name, " ".join(unit.flags), error)
        return None
    return target


def _run(command: Sequence[str]) -> str:
    """Standard output of a command; raises BuildError with the first line that names an error."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
        raise BuildError(next((line for line in lines if "error" in line), lines[0]))
    return done.stdout


def _loads(path: Path) -> bool:
    """Whether the file is a library this process can load (an interrupted disk may have left a broken one)."""
    try:
        ctypes.CDLL(str(path))
    except OSError:
        return False
    return True
