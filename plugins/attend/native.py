"""The native CPU form of `attend`: builds cpu_*.cpp at first use, hands them raw pointers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from plugins import native_build, native_levels
from plugins.attend.params import AttendParams, AttendStep, AttendTables, StepTables
from plugins.layout import BlockLayout
from plugins.memory import KvMemory
from plugins.native_build import Library, Unit
from plugins.native_levels import DTYPE_CODES, FORMAT_CODES, LEVELS, Level

_HERE = Path(__file__).resolve().parent
_NO_MEMORY = "attend: no memory for its scratch; lower the rows per step"

_POINTERS = ("q", "out", "pages", "seen", "blocks", "score", "row_starts", "page_starts", "page_ids", "page_lens",
             "block_starts", "block_ids", "block_lens", "record_skip", "record", "parallel")  # fmt: skip
_SIZES = ("num_seqs", "kv_heads", "group", "head_dim", "page_tokens", "block_entries", "block_bytes",
          "v_codes", "k_scale", "k_min", "v_scale", "v_min", "bias")  # fmt: skip
_CODES = ("q_dtype", "page_dtype", "k_format", "v_format", "num_threads", "level")


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


class NativeAttend:
    """`attend` on the CPU, for one record (a call) or for the layers of a step (`begin`)."""

    def __init__(self, lib: ctypes.CDLL, level: int, num_threads: int, parallel: int | None) -> None:
        self._call = lib.commitkv_attend
        self._call.argtypes, self._call.restype = (ctypes.c_void_p,), ctypes.c_int32
        self._level, self._threads, self._parallel = level, num_threads, parallel

    def __call__(self, params: AttendParams) -> None:
        args = pack(params)
        self._run(args, ctypes.addressof(args))

    def begin(self, memory: KvMemory, tables: StepTables, scale: float) -> AttendStep:
        args = _geometry(memory.pages[0], memory.layout)
        args.blocks, args.score, args.scale = memory.blocks.data_ptr(), memory.score.data_ptr(), scale
        _set_tables(args, tables)
        args.num_threads, args.level, args.parallel = self._threads, self._level, self._parallel
        return _Step(self._call, args, memory, tables)

    def _run(self, args: _Args, address: int) -> None:
        args.num_threads, args.level, args.parallel = self._threads, self._level, self._parallel
        if self._call(address) != 0:
            raise MemoryError(_NO_MEMORY)


class _Step:
    """One argument record for the layers of a step; a call sets what differs."""

    def __init__(self, call: Callable[[int], int], args: _Args, memory: KvMemory, tables: StepTables) -> None:
        self._call, self._args, self._address = call, args, ctypes.addressof(args)
        self._tables = tables  # whose tensors have to live
        blocks = tables.blocks
        starts, ids, lens = blocks.starts.data_ptr(), blocks.ids.data_ptr(), blocks.lens.data_ptr()
        row = 4 * blocks.starts.shape[1]
        self._layers = [
            (*pointers, starts + layer * row, ids + 4 * first, lens + 4 * first)
            for layer, (pointers, first) in enumerate(zip(memory.addresses, blocks.first, strict=False))
        ]

    def __call__(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        self._point(q, out)
        self._run(layer)

    def bind(self, q: torch.Tensor, out: torch.Tensor) -> Callable[[int], None]:
        """See `plugins.bound.BindsAttend`."""
        self._point(q, out)
        return self._run

    def _run(self, layer: int) -> None:
        args = self._args
        args.pages, args.seen, args.block_starts, args.block_ids, args.block_lens = self._layers[layer]
        if self._call(self._address) != 0:
            raise MemoryError(_NO_MEMORY)

    def _point(self, q: torch.Tensor, out: torch.Tensor) -> None:
        args = self._args
        if not args.group:
            assert q.is_contiguous() and out.is_contiguous() and q.shape == out.shape and q.dtype == out.dtype
            assert q.shape[0] == self._tables.record.shape[0] and q.shape[2] == args.head_dim
            assert q.shape[1] % args.kv_heads == 0
            args.group, args.q_dtype = q.shape[1] // args.kv_heads, DTYPE_CODES[q.dtype]
        args.q, args.out = q.data_ptr(), out.data_ptr()


def make_attend(
    num_threads: int,
    level: Level | None = None,
    cache_dir: Path | None = None,
    share_openmp: bool = False,
) -> NativeAttend | None:
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
    return NativeAttend(lib, chosen, num_threads, _openmp_entry() if share_openmp else None)


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
    q, pages, tables = params.q, params.pages, params.tables
    args = _geometry(pages, params.block_layout)
    assert q.is_contiguous() and params.out.is_contiguous() and params.out.dtype == q.dtype
    assert pages.is_contiguous() and params.seen.is_contiguous()
    assert params.blocks.is_contiguous() and params.score.is_contiguous()
    assert q.shape[1] % args.kv_heads == 0
    args.q, args.out, args.scale = q.data_ptr(), params.out.data_ptr(), params.scale
    args.pages, args.seen = pages.data_ptr(), params.seen.data_ptr()
    args.blocks, args.score = params.blocks.data_ptr(), params.score.data_ptr()
    args.group, args.q_dtype = q.shape[1] // args.kv_heads, DTYPE_CODES[q.dtype]
    _set_tables(args, tables)
    args.block_starts, args.block_ids = tables.block_starts.data_ptr(), tables.block_ids.data_ptr()
    args.block_lens, args.num_threads = tables.block_lens.data_ptr(), 1
    return args


def _geometry(pages: torch.Tensor, layout: BlockLayout) -> _Args:
    """Sizes and codes that follow from the arenas."""
    _, kv_heads, _, page_tokens, head_dim = pages.shape
    return _Args.from_buffer_copy(_geometry_of(kv_heads, page_tokens, head_dim, pages.dtype, layout))


@lru_cache(maxsize=64)
def _geometry_of(kv_heads: int, page_tokens: int, head_dim: int, dtype: torch.dtype, layout: BlockLayout) -> _Args:
    assert head_dim % 8 == 0 and head_dim <= 256 and head_dim == layout.head_dim
    args = _Args()
    args.kv_heads, args.head_dim, args.page_tokens = kv_heads, head_dim, page_tokens
    for name in ("block_entries", "block_bytes", "v_codes", "k_scale", "k_min", "v_scale", "v_min", "bias"):
        setattr(args, name, getattr(layout, name))
    args.page_dtype = DTYPE_CODES[dtype]
    args.k_format, args.v_format = FORMAT_CODES[layout.format]
    return args


def _set_tables(args: _Args, tables: AttendTables | StepTables) -> None:
    """The tables that are the same in every layer."""
    args.row_starts, args.page_starts = tables.row_starts.data_ptr(), tables.page_starts.data_ptr()
    args.page_ids, args.page_lens = tables.page_ids.data_ptr(), tables.page_lens.data_ptr()
    args.record, args.record_skip = tables.record.data_ptr(), tables.record_skip.data_ptr()
    args.num_seqs = tables.row_starts.shape[0] - 1
