"""Compiles kernels to cubins with NVRTC, and reads what came out. Needs no GPU and no driver.

The packages (cuda-python, nvidia-cuda-nvrtc, nvidia-cuda-runtime for the headers; nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm to look at cubins) are imported when something is first compiled.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugins.errors import CompileError, MissingPackageError, UnsupportedSmError
from plugins.kernel import PLUGINS, Kernel
from plugins.native_build import default_cache_dir

SMS = ("sm_80", "sm_89", "sm_90a", "sm_120")
INSTALL = (
    "pip install cuda-python nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-cccl "
    "nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
)
OPTIONS = ("--std=c++17", "-default-device", "--extra-device-vectorization")
TOOL_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Resources:
    """What one entry of a cubin takes: registers and bytes of stack a thread, bytes of static shared memory a block."""

    entry: str
    registers: int
    shared_bytes: int
    stack_bytes: int


def compile_cubin(kernel: Kernel, sm: str, extra_options: tuple[str, ...] = (), cache_dir: Path | None = None) -> bytes:
    """The kernel for one architecture of SMS, from `cache_dir` (default: the user's cache) when it was compiled before.

    extra_options: to NVRTC, such as "-DHW_DEBUG". Raises UnsupportedSmError, MissingPackageError, CompileError.
    """
    if sm not in SMS:
        raise UnsupportedSmError(f"sm: got {sm!r}, expected one of {', '.join(SMS)}")
    nvrtc, include = _nvrtc(), include_folder()
    options = (
        f"--gpu-architecture={sm}",
        *OPTIONS,
        *(f"-D{name}={value}" for name, value in kernel.defines),
        *extra_options,
    )
    folder = cache_dir or default_cache_dir()
    path = folder / f"{kernel.op}-{sm}-{_content_hash(kernel, options, _version(nvrtc))}.cubin"
    if path.exists():
        return path.read_bytes()
    cubin = _compile(nvrtc, kernel, (*options, *(f"-I{folder}" for folder in (PLUGINS, kernel.source.parent, include))))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        file.write(cubin)
    os.replace(file.name, path)  # readers see no file or the whole file
    return cubin


def compile_all(kernels: Iterable[Kernel], sm: str, num_threads: int = 2) -> dict[Kernel, bytes]:
    """Cubins of several kernels, compiled at the same time. Raises as `compile_cubin`."""
    wanted = tuple(dict.fromkeys(kernels))
    with ThreadPoolExecutor(max_workers=num_threads) as pool:  # NVRTC works outside Python's lock
        return dict(zip(wanted, pool.map(lambda kernel: compile_cubin(kernel, sm), wanted), strict=True))


def resource_usage(cubin: bytes) -> tuple[Resources, ...]:
    """Of every entry, by cuobjdump. Raises MissingPackageError, CompileError."""
    text = _run_tool("cuobjdump", "-res-usage", cubin)
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    if not found:
        raise CompileError(f"cuobjdump -res-usage: no function in its output:\n{text}")
    return tuple(Resources(entry, int(reg), int(shared), int(stack)) for entry, reg, stack, shared in found)


def sass(cubin: bytes) -> dict[str, str]:
    """Machine code of every entry as text, by nvdisasm. Raises MissingPackageError, CompileError."""
    text = _run_tool("nvdisasm", "-c", cubin)
    pieces = re.split(r"^\.text\.(\w+):\s*$", text, flags=re.MULTILINE)
    if len(pieces) < 3:
        raise CompileError(f"nvdisasm: no code in its output:\n{text[:500]}")
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def _nvrtc() -> Any:
    try:
        return importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise MissingPackageError(f"compiling kernels needs NVRTC ({error}); {INSTALL}") from error


def include_folder() -> Path:
    """Where cuda_fp16.h is: the folder that the nvidia-cuda-runtime wheel brings."""
    for path in _wheel_folders():
        if (path / "include" / "cuda_fp16.h").exists():
            return path / "include"
    raise MissingPackageError(f"compiling kernels needs cuda_fp16.h of nvidia-cuda-runtime; {INSTALL}")


def _wheel_folders() -> list[Path]:
    """Folders nvidia/cu<major> of the installed wheels, newest first."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    return sorted((path for root in roots for path in Path(root).glob("cu[0-9]*")), reverse=True)


def _version(nvrtc: Any) -> str:
    status, major, minor = nvrtc.nvrtcVersion()
    _check(nvrtc, status, "nvrtcVersion")
    return f"{major}.{minor}"


def _content_hash(kernel: Kernel, options: tuple[str, ...], version: str) -> str:
    digest = hashlib.sha256()
    for part in (version, *options):
        digest.update(part.encode() + b"\0")
    for path in (kernel.source, *kernel.headers):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _check(nvrtc: Any, status: Any, call: str) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"{call}: {status.name}")


def _compile(nvrtc: Any, kernel: Kernel, options: tuple[str, ...]) -> bytes:
    source = kernel.source.read_bytes()
    status, program = nvrtc.nvrtcCreateProgram(source, kernel.source.name.encode(), 0, [], [])
    _check(nvrtc, status, "nvrtcCreateProgram")
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{kernel.label} for {options[0].split('=')[1]}: {status.name}\n{_log(nvrtc, program)}")
        status, size = nvrtc.nvrtcGetCUBINSize(program)
        _check(nvrtc, status, "nvrtcGetCUBINSize")
        cubin = bytearray(size)
        (status,) = nvrtc.nvrtcGetCUBIN(program, cubin)
        _check(nvrtc, status, "nvrtcGetCUBIN")
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _log(nvrtc: Any, program: Any) -> str:
    status, size = nvrtc.nvrtcGetProgramLogSize(program)
    _check(nvrtc, status, "nvrtcGetProgramLogSize")
    log = bytearray(size)
    (status,) = nvrtc.nvrtcGetProgramLog(program, log)
    _check(nvrtc, status, "nvrtcGetProgramLog")
    return log.rstrip(b"\0").decode(errors="replace")


def _run_tool(name: str, option: str, cubin: bytes) -> str:
    candidates = [path / "bin" / name for path in _wheel_folders()]
    candidates.append(Path(sysconfig.get_path("scripts")) / name)
    tool = next((path for path in candidates if path.exists()), None)
    if tool is None:
        raise MissingPackageError(f"looking at cubins needs {name} of nvidia-cuda-{name}; {INSTALL}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [str(tool), option, file.name], capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False
        )
    if done.returncode != 0:
        raise CompileError(f"{name} {option}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
