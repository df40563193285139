"""TensorRT's real Python bindings on a machine without TensorRT: over libraries that export nine empty functions.

`type_stubs` writes what mypy checks calls against. The wheel carries no `.pyi`, so mypy's own `stubgen` reads the
signatures out of the bindings; what it cannot see is put right here: conversions that the bindings do on the way in
(list to Dims, str to FallbackString), the buffer protocol, and overloads that stand for C++ virtual functions.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIBRARIES = ("libnvinfer.so.11", "libnvinfer_plugin.so.11", "libnvonnxparser.so.11")
BINDINGS = "tensorrt_bindings.tensorrt"
TIMEOUT_S = 120.0


def build_libraries(folder: Path) -> None:
    """Compiles the libraries into `folder`."""
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler is not None, "no C++ compiler"
    source = HERE / "stub_tensorrt.cpp"
    for name in LIBRARIES:
        command = [compiler, "-shared", "-fPIC", str(source), f"-Wl,-soname,{name}", "-o", str(folder / name)]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)


def environment_of(folder: Path) -> dict[str, str]:
    """The environment of a process that imports the bindings over the libraries in `folder`."""
    paths = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(path for path in paths if path)}


def load_bindings(folder: Path) -> Any:
    """The bindings' module in this process, over libraries that `build_libraries` put into `folder`.

    The loader takes a library that is loaded already for one of the same name. Their symbols stay local, so that
    TensorRT-RTX, whose libraries export the same names, works in the same process.
    """
    for name in LIBRARIES:
        ctypes.CDLL(str(folder / name))
    return importlib.import_module(BINDINGS)


def type_stubs(folder: Path, environment: dict[str, str]) -> Path:
    """A folder for MYPYPATH that holds package `tensorrt`, in `folder`."""
    stubgen = [sys.executable, "-c", "from mypy.stubgen import main; main()"]  # compiled: not to be run with -m
    command = [*stubgen, "--inspect-mode", "-q", "-m", BINDINGS, "-o", str(folder)]
    subprocess.run(command, check=True, env=environment, timeout=TIMEOUT_S)
    text = (folder / (BINDINGS.replace(".", "/") + ".pyi")).read_text()
    package = folder / "typings" / "tensorrt"
    package.mkdir(parents=True)
    (package / "__init__.pyi").write_text(_corrected(text))
    return package.parent


def _corrected(text: str) -> str:
    text = re.sub(r"    @overload\n    def \w+\(self\) -> Any: \.\.\.\n", "", text)  # C++ virtual functions once more
    text = "\n".join(_with_defaults(line) for line in _without_single_overloads(text.splitlines()))
    text = text.replace("FallbackString", "str")
    text = re.sub(r"class str:.*?\n\n", "", text, flags=re.DOTALL)
    text = text.replace("def get_aliased_input(self)", "def get_aliased_input(self, output_index: typing.SupportsInt)")
    text = text.replace(
        "class IHostMemory:\n", "class IHostMemory:\n    def __buffer__(self, flags: int) -> memoryview: ...\n"
    )
    text = re.sub(r"(: |-> |\[|\| )bool\b", r"\1builtins.bool", text)  # the module has a variable of that name
    return "import builtins\n" + _with_shape_conversions(text) + "\n"


def _without_single_overloads(lines: list[str]) -> list[str]:
    """An @overload must have another beside it."""

    def overloaded(index: int) -> str | None:
        if index < 0 or index + 1 >= len(lines) or lines[index] != "    @overload":
            return None
        found = re.match(r"    def (\w+)\(", lines[index + 1])
        return found and found.group(1)

    keep = [
        line != "    @overload" or overloaded(i) in (overloaded(i - 2), overloaded(i + 2))
        for i, line in enumerate(lines)
    ]
    return [line for line, kept in zip(lines, keep, strict=True) if kept]


def _with_defaults(line: str) -> str:
    """A parameter after one with a default gets one as well; stubgen loses some."""
    found = re.match(r"(    def \w+\()(.*)(\) -> .*)", line)
    if found is None:
        return line
    optional, parameters = False, []
    for parameter in re.split(r", (?![^\[(]*[\])])", found.group(2)):
        optional = optional or " = " in parameter
        missing = optional and " = " not in parameter and not parameter.startswith("*")
        parameters.append(f"{parameter} = ..." if missing else parameter)
    return found.group(1) + ", ".join(parameters) + found.group(3)


def _with_shape_conversions(text: str) -> str:
    """Dims and Permutation are taken as any sequence of whole numbers, and can be iterated by index."""
    wide = r"\1 | collections.abc.Sequence[int]"
    text = re.sub(r"def \w+\(.*", lambda m: re.sub(r"(?<=: )(Dims|Permutation)(?=[,)])", wide, m.group()), text)
    text = re.sub(
        r"(class (?:Dims|Permutation):\n)", r"\1    def __iter__(self) -> collections.abc.Iterator[int]: ...\n", text
    )
    return re.sub(
        r"\n    (\w+): (Dims|Permutation)\n",
        r"\n    @property\n    def \1(self) -> \2: ...\n    @\1.setter\n"
        r"    def \1(self, value: \2 | collections.abc.Sequence[int]) -> None: ...\n",
        text,
    )
