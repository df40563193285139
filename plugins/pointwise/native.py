"""The native CPU form of `pointwise`: one call of a few microseconds per operation and layer."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from plugins import native_build, native_levels
from plugins.bound import Bound, bound
from plugins.native_build import Library
from plugins.native_levels import DTYPE_CODES, VECTOR_LEVELS, Level

_POINTER, _SIZE, _CODE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_NORM = "commitkv_rms_norm"
_SILU = "commitkv_gated_silu"


def library(flags: tuple[str, ...] = (), levels: tuple[Level, ...] = VECTOR_LEVELS) -> Library:
    """What native_build compiles."""
    kernel = Path(__file__).resolve().parent / "cpu_kernel.cpp"
    return native_levels.level_library("pointwise", kernel, levels, flags=flags)


class NativePointwise:
    """`plugins.pointwise.params.Pointwise` on the CPU. Bits depend on the level, not on the number of threads."""

    def __init__(self, lib: ctypes.CDLL, level: Level | None, num_threads: int) -> None:
        """Raises ValueError for a level that this processor or this build does not have."""
        chosen = native_levels.choose_level(native_levels.levels_of(lib, _NORM), level)
        self._threads = num_threads
        self._norm, self._silu = (getattr(lib, f"{name}_{chosen}") for name in (_NORM, _SILU))
        self._norm.restype = self._silu.restype = None
        self._norm.argtypes = (*(_POINTER,) * 5, *(_SIZE,) * 4, ctypes.c_float, _CODE, _CODE)
        self._silu.argtypes = (_POINTER, _POINTER, _SIZE, _SIZE, _CODE, _CODE)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        self.bind_rms_norm(x, weight, eps, out)()
        return out

    def bind_rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> Bound:
        rows, heads, dim = x.shape if x.dim() == 3 else (x.shape[0], 1, x.shape[1])
        assert x.stride(-1) == 1 and (heads == 1 or x.stride(1) == dim), "the heads of a row must lie side by side"
        return bound(
            self._norm, x.data_ptr(), None, weight.data_ptr(), None, out.data_ptr(), rows, heads, x.stride(0), dim, eps,
            DTYPE_CODES[x.dtype], self._threads, alive=(x, weight, out),
        )  # fmt: skip

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, out = torch.empty_like(x), torch.empty_like(x)
        self._add_norm((x, delta, weight, total, out), eps)()
        return total, out

    def bind_add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> Bound:
        return self._add_norm((x, delta, weight, x, out), eps)

    def _add_norm(self, tensors: tuple[torch.Tensor, ...], eps: float) -> Bound:
        """tensors: x, delta, weight, total, out."""
        x, delta = tensors[:2]
        assert x.is_contiguous() and delta.is_contiguous() and delta.dtype == x.dtype
        rows, dim = x.shape
        addresses = (tensor.data_ptr() for tensor in tensors)
        code = DTYPE_CODES[x.dtype]
        return bound(self._norm, *addresses, rows, 1, dim, dim, eps, code, self._threads, alive=tensors)

    def gated_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype)
        self.bind_gated_silu(gate_up, out)()
        return out

    def bind_gated_silu(self, gate_up: torch.Tensor, out: torch.Tensor) -> Bound:
        assert gate_up.is_contiguous()
        rows, dim = out.shape
        code = DTYPE_CODES[gate_up.dtype]
        return bound(
            self._silu, gate_up.data_ptr(), out.data_ptr(), rows, dim, code, self._threads, alive=(gate_up, out)
        )


def make_pointwise(
    num_threads: int, level: Level | None = None, cache_dir: Path | None = None
) -> NativePointwise | None:
    """The native form, or None without a compiler (said once in the log). level: None for the processor's best."""
    lib = native_build.load(library(), cache_dir)
    return None if lib is None else NativePointwise(lib, level, num_threads)
