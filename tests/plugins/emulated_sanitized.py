"""Runs one function with a sanitizing EmulatedRunner, in a process that has AddressSanitizer loaded first.

Started by `run_sanitized_emulation`, from the tests of each operation. Tensors come from malloc, so that accesses of
global memory beyond them are seen.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plugins import native_build
from plugins.emulation.runner import EmulatedRunner

TIMEOUT_S = 300


def run_sanitized_emulation(module: str, function: str) -> subprocess.CompletedProcess[str]:
    """Calls `function(EmulatedRunner(sanitize=True))` of a module in tests/plugins in such a process.

    Its standard output ends with "done" when nothing was found. Skips the test without g++ and its AddressSanitizer.
    """
    compiler = native_build.find_compiler()
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(runtime):
        pytest.skip("this compiler has no AddressSanitizer")
    here = Path(__file__).resolve()
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "HOME": os.environ.get("HOME", ""),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", ""),
        "LD_PRELOAD": os.path.realpath(runtime),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": f"{here.parents[2]}{os.pathsep}{here.parent}",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(here), module, function]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S)


if __name__ == "__main__":
    os.environ.pop("LD_PRELOAD")  # the compiler needs none
    getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(EmulatedRunner(sanitize=True))
    print("done")
