"""Instruction levels of the native forms: which units are compiled, and which code a processor runs.

A native library holds `cpu_support.cpp` once and each kernel source once per level, in a namespace of its own.
"""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from typing import Literal

import torch

from plugins.native_build import Library, Unit

Level = Literal["portable", "avx2", "avx512", "amx"]
LEVELS: tuple[Level, ...] = ("portable", "avx2", "avx512", "amx")  # order of commitkv::Level
VECTOR_LEVELS: tuple[Level, ...] = LEVELS[:3]  # for kernels that have no use for tile registers

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # commitkv::DType
# How a block format holds K and V, each a commitkv::DType.
FORMAT_CODES = {"fp32": (0, 0), "bf16": (1, 1), "fp16": (2, 2), "int8": (3, 3), "k8v4": (3, 4), "int4": (4, 4)}

_PLUGINS = Path(__file__).resolve().parent
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_LEVEL_FLAGS: dict[Level, tuple[str, ...]] = {
    "portable": (),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}


def level_library(
    name: str, kernel: Path, levels: tuple[Level, ...], entry: tuple[Unit, ...] = (), flags: tuple[str, ...] = ()
) -> Library:
    """A library of one kernel source, compiled once per level of this machine's processor family.

    entry: units compiled for the plain processor. Headers beside the kernel and in `plugins` count for the cache.
    """
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    units = [Unit(_PLUGINS / "cpu_support.cpp"), *entry]
    for level in levels if x86 else LEVELS[:1]:
        level_flags = (f"-DCOMMITKV_LEVEL={level}", *_LEVEL_FLAGS[level])
        units.append(Unit(kernel, level_flags, optional=level != "portable"))
    headers = (*sorted(kernel.parent.glob("*.hpp")), *sorted(_PLUGINS.glob("*.hpp")))
    return Library(name, tuple(units), headers, flags)


def levels_of(lib: ctypes.CDLL, entry: str) -> tuple[Level, ...]:
    """The levels that both this processor and the build have; `entry`: C name before `_<level>`."""
    return tuple(
        level
        for code, level in enumerate(LEVELS)
        if lib.commitkv_processor_has(code) and getattr(lib, f"{entry}_{level}", None) is not None
    )


def choose_level(available: tuple[Level, ...], level: Level | None) -> Level:
    """`level`, or the best of `available` for None. Raises ValueError for one that is not among them."""
    if level is not None and level not in available:
        raise ValueError(f"level: got {level!r}, expected one of {', '.join(available)}; this processor has no other")
    return level or available[-1]
