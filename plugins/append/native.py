"""The native CPU form of `append`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from plugins import native_build, native_levels
from plugins.append.params import AppendStep, Rotary
from plugins.memory import KvMemory
from plugins.native_build import Library
from plugins.native_levels import DTYPE_CODES, VECTOR_LEVELS, Level

_ENTRY = "commitkv_append"
_POINTERS = ("q", "k", "v", "q_out", "pages", "seen", "cos", "sin", "slots")
_SIZES = ("q_stride", "k_stride", "v_stride", "rotary_stride", "rows", "q_heads", "kv_heads", "head_dim", "page_tokens")


class _Args(ctypes.Structure):
    """Mirrors commitkv::AppendArgs of cpu_kernel.cpp field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_int32) for name in ("dtype", "kv_dtype", "threads")),
    )


def library(flags: tuple[str, ...] = (), levels: tuple[Level, ...] = VECTOR_LEVELS) -> Library:
    """What native_build compiles."""
    kernel = Path(__file__).resolve().parent / "cpu_kernel.cpp"
    return native_levels.level_library("append", kernel, levels, flags=flags)


class NativeAppend:
    """`plugins.append.params.AppendForm` on the CPU."""

    def __init__(self, lib: ctypes.CDLL, level: Level | None, num_threads: int) -> None:
        """Raises ValueError for a level that this processor or this build does not have."""
        chosen = native_levels.choose_level(native_levels.levels_of(lib, _ENTRY), level)
        self._call = getattr(lib, f"{_ENTRY}_{chosen}")
        self._call.argtypes, self._call.restype = (ctypes.c_void_p,), None
        self._threads = num_threads

    def begin(self, slots: torch.Tensor, rotary: Rotary, memory: KvMemory) -> AppendStep:
        return _Step(self._call, self._threads, (slots, *rotary), memory)


class _Step:
    """One argument record for the layers of a step; a call sets what differs."""

    def __init__(
        self,
        call: Callable[[int], None],
        threads: int,
        tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        memory: KvMemory,
    ) -> None:
        slots, cos, sin = tables
        _, kv_heads, _, page_tokens, head_dim = memory.pages[0].shape
        assert slots.dtype == torch.int64 and slots.is_contiguous() and head_dim % 2 == 0
        assert cos.dtype == sin.dtype == torch.float32 and cos.stride() == sin.stride() and cos.stride(1) == 1
        self._alive = tables
        self._call, self._addresses, self._kv_heads, self._head_dim = call, memory.addresses, kv_heads, head_dim
        args = self._args = _Args()
        args.cos, args.sin, args.slots = cos.data_ptr(), sin.data_ptr(), slots.data_ptr()
        args.rotary_stride, args.rows, args.kv_heads = cos.stride(0), slots.shape[0], kv_heads
        args.head_dim, args.page_tokens = head_dim, page_tokens
        args.kv_dtype, args.threads = DTYPE_CODES[memory.pages[0].dtype], threads
        self._address = ctypes.addressof(args)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        self._point(q, k, v, out)
        self._run(layer)
        return out

    def bind(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> Callable[[int], None]:
        """See `plugins.bound.BindsAppend`."""
        self._point(q, k, v, out)
        return self._run

    def _run(self, layer: int) -> None:
        self._args.pages, self._args.seen = self._addresses[layer]
        self._call(self._address)

    def _point(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        args = self._args
        if not args.q_heads:
            self._check(q, k, v)
        args.q_stride, args.k_stride, args.v_stride = q.stride(0), k.stride(0), v.stride(0)
        args.q, args.k, args.v, args.q_out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """What is the same in every layer."""
        args = self._args
        for x in (q, k, v):
            assert x.dtype == q.dtype and x.shape[0] == args.rows and x.shape[2] == self._head_dim
            assert x.stride(2) == 1 and x.stride(1) == self._head_dim, "the heads of a row must lie side by side"
        assert k.shape[1] == v.shape[1] == self._kv_heads
        args.dtype, args.q_heads = DTYPE_CODES[q.dtype], q.shape[1]


def make_append(num_threads: int, level: Level | None = None, cache_dir: Path | None = None) -> NativeAppend | None:
    """The native form, or None without a compiler (said once in the log). level: None for the processor's best."""
    lib = native_build.load(library(), cache_dir)
    return None if lib is None else NativeAppend(lib, level, num_threads)
