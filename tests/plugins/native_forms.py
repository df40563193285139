"""Native forms under test: one per instruction level of this processor, and runs under sanitizers."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from plugins import native_build, native_levels
from plugins.native_build import Library
from plugins.native_levels import Level

Form = TypeVar("Form")
SANITIZERS = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def load(library: Library) -> ctypes.CDLL | None:
    """The built library, None on a machine without a compiler."""
    return native_build.load(library) if native_build.find_compiler() else None


def forms_of(lib: ctypes.CDLL | None, entry: str, make: Callable[[ctypes.CDLL, Level, int], Form]) -> dict[Level, Form]:
    """make(lib, level, 2 threads) per level; empty without a compiler."""
    if lib is None:
        return {}
    available = native_levels.levels_of(lib, entry)
    assert available[0] == "portable"
    return {level: make(lib, level, 2) for level in available}


def run_sanitized(library: Library, script: str, *arguments: str) -> None:
    """Builds `library` (made with SANITIZERS) and runs `script` on it with AddressSanitizer loaded first."""
    compiler = native_build.find_compiler()
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(runtime):
        pytest.skip("this compiler has no AddressSanitizer")
    cache = native_build.default_cache_dir()
    path = native_build.library_path(library, cache, compiler)
    if not path.exists():  # `build` would load an earlier one, which ends a process that began without its runtime
        native_build.build(library, cache, compiler)
    here = Path(__file__).resolve()
    environment = {
        "PATH": os.environ.get("PATH", ""), "LD_PRELOAD": os.path.realpath(runtime), "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": f"{here.parents[2]}{os.pathsep}{here.parent}", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, str(here.parent / script), str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-3000:]
