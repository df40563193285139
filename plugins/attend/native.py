"""The native CPU form of `attend`: builds cpu_*.cpp at first use, hands them raw pointers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from plugins import native_build, native_levels
from plugins.attend.params import AttendParams
from plugins.native_build import Library, Unit
from plugins.native_levels import DTYPE_CODES, FORMAT_CODES, LEVELS, Level

_HERE = Path(__file__).resolve().parent

_POINTERS = ("q", "out", "pages", "seen", "blocks", "score", "row_starts", "page_starts", "page_ids", "page_lens",
             "block_starts", "block_ids", "block_lens", "record", "parallel")  # fmt: skip
_SIZES = ("num_seqs", "kv_heads", "group", "head_dim", "page_tokens", "block_entries", "block_bytes",
          "v_codes", "k_scale", "k_min", "v_scale", "v_min", "bias")  # fmt: skip
_CODES = ("q_dtype", "page_dtype", "block_format", "num_threads", "level")


class _Args(ctypes.Structure):
    """Mirrors commitkv::Args of cpu_plan.hpp field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_int32) for name in _CODES),
        ("scale", ctypes.c_float),
    )


def library(extra_flags: tuple[str, ...] = (), levels: tuple[Level, ...] = LEVELS) -> Library:
    """What native_build compiles for this machine's processor family: one unit per instruction level, and the entry."""
    entry = (Unit(_HERE / "cpu_entry.cpp"),)
    return native_levels.level_library("attend", _HERE / "cpu_kernel.cpp", levels, entry, extra_flags)


def make_attend(
    num_threads: int,
    level: Level | None = None,
    cache_dir: Path | None = None,
    share_openmp: bool = False,
) -> Callable[[AttendParams], None] | None:
    """`attend` over AttendParams on the CPU, or None without a compiler (said once in the log).

    level: instruction level to force, None for the best this processor has. The other threads are a small pool that
    sleeps between calls; share_openmp takes the threads of the OpenMP library that torch has loaded instead, whose
    spinning suits an idle machine and collapses on a loaded one. Results depend on neither, nor on num_threads.
    Raises ValueError for a level that this processor or this build does not have.
    """
    lib = native_build.load(library(), cache_dir)
    if lib is None:
        return None
    chosen = LEVELS.index(native_levels.choose_level(_levels_of(lib), level))
    parallel = _openmp_entry() if share_openmp else None
    call = lib.commitkv_attend
    call.argtypes, call.restype = (ctypes.c_void_p,), ctypes.c_int32

    def attend(params: AttendParams) -> None:
        args = pack(params)
        args.num_threads, args.level, args.parallel = num_threads, chosen, parallel
        if call(ctypes.addressof(args)) != 0:
            raise MemoryError("attend: no memory for its scratch; lower the rows per step")

    return attend


def levels(cache_dir: Path | None = None) -> tuple[Level, ...]:
    """The instruction levels that both this processor and the build have; empty without a compiler."""
    lib = native_build.load(library(), cache_dir)
    return () if lib is None else _levels_of(lib)


def _levels_of(lib: ctypes.CDLL) -> tuple[Level, ...]:
    return tuple(name for code, name in enumerate(LEVELS) if lib.commitkv_attend_has(code))


def _openmp_entry() -> int | None:
    """Address of GOMP_parallel in the OpenMP library this process has loaded already, or None."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    for path in dict.fromkeys(line.split()[-1] for line in lines if "/lib" in line):
        if Path(path).name.startswith(("libgomp", "libomp", "libiomp5")):
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value
    return None


def pack(params: AttendParams) -> _Args:
    """The C view of `params`; valid as long as its tensors live."""
    q, pages, layout, tables = params.q, params.pages, params.block_layout, params.tables
    _, kv_heads, _, page_tokens, head_dim = pages.shape
    assert head_dim % 8 == 0 and head_dim <= 256 and q.shape[1] % kv_heads == 0
    assert q.is_contiguous() and params.out.is_contiguous() and params.out.dtype == q.dtype
    assert pages.is_contiguous() and params.seen.is_contiguous()
    assert params.blocks.is_contiguous() and params.score.is_contiguous()
    return _Args(
        q.data_ptr(), params.out.data_ptr(), pages.data_ptr(), params.seen.data_ptr(),
        params.blocks.data_ptr(), params.score.data_ptr(), tables.row_starts.data_ptr(),
        tables.page_starts.data_ptr(), tables.page_ids.data_ptr(), tables.page_lens.data_ptr(),
        tables.block_starts.data_ptr(), tables.block_ids.data_ptr(), tables.block_lens.data_ptr(),
        tables.record.data_ptr(), None,
        len(tables.row_starts) - 1, kv_heads, q.shape[1] // kv_heads, head_dim, page_tokens,
        layout.block_entries, layout.block_bytes, layout.v_codes, layout.k_scale, layout.k_min,
        layout.v_scale, layout.v_min, layout.bias,
        DTYPE_CODES[q.dtype], DTYPE_CODES[pages.dtype], FORMAT_CODES[layout.format], 1, 0, params.scale,
    )  # fmt: skip
