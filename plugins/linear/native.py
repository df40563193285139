"""The native CPU form of `linear`: bf16 on AMX tiles. What it has no kernel for is left to torch's form."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from plugins import native_build, native_levels
from plugins.linear.cpu import TorchLinear
from plugins.linear.params import Product
from plugins.native_build import Library
from plugins.native_levels import Level

_ENTRY = "commitkv_linear"
_TILE_ROWS = 16
_POINTER, _SIZE, _CODE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


def library(flags: tuple[str, ...] = (), levels: tuple[Level, ...] = ("amx",)) -> Library:
    """What native_build compiles."""
    kernel = Path(__file__).resolve().parent / "cpu_kernel.cpp"
    return native_levels.level_library("linear", kernel, levels, flags=flags)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] bf16 -> [out / 16, in / 32, 16, 16, 2]: tiles of pairs of inputs, in the order they are read."""
    outputs, inputs = weight.shape
    return weight.view(outputs // 16, 16, inputs // 32, 16, 2).permute(0, 2, 3, 1, 4).contiguous()


class NativeLinear:
    """`plugins.linear.params.LinearForm` on the CPU. A row's bits depend on nothing but the row."""

    def __init__(self, lib: ctypes.CDLL, level: Level | None, num_threads: int) -> None:
        """Raises ValueError for a level that this processor or this build does not have."""
        chosen = native_levels.choose_level(native_levels.levels_of(lib, _ENTRY), level)
        self._linear, self._logits = (getattr(lib, f"{name}_{chosen}") for name in (_ENTRY, "commitkv_logits"))
        self._linear.restype = self._logits.restype = None
        self._linear.argtypes = (*(_POINTER,) * 4, *(_SIZE,) * 3, _CODE)
        self._logits.argtypes = (*(_POINTER,) * 3, *(_SIZE,) * 3, _CODE)
        self._threads = num_threads
        self._other = TorchLinear()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        outputs, inputs = weight.shape
        if weight.dtype != torch.bfloat16 or inputs % 32 or outputs % 16:
            return self._other.linear(weight, bias)
        packed, wide = pack(weight), None if bias is None else bias.float()
        call, threads = self._linear, self._threads

        def product(x: torch.Tensor) -> torch.Tensor:
            assert x.is_contiguous() and x.dtype == packed.dtype and x.shape[1] == inputs
            rows = x.shape[0]
            out = torch.empty((rows, outputs), dtype=torch.bfloat16)
            bias_at = None if wide is None else wide.data_ptr()
            call(x.data_ptr(), packed.data_ptr(), bias_at, out.data_ptr(), rows, inputs, outputs, threads)
            return out

        return product

    def logits(self, table: torch.Tensor) -> Product:
        vocab, inputs = table.shape
        if table.dtype != torch.bfloat16 or inputs % 32 or vocab < _TILE_ROWS or not table.is_contiguous():
            return self._other.logits(table)
        call, threads = self._logits, self._threads

        def product(x: torch.Tensor) -> torch.Tensor:
            assert x.dtype == table.dtype and x.shape[1] == inputs
            out = torch.empty((x.shape[0], vocab))
            for part, to in zip(torch.split(x, _TILE_ROWS), torch.split(out, _TILE_ROWS), strict=True):
                rows = part.shape[0]
                pairs = part.reshape(rows, inputs // 2, 2).transpose(0, 1).contiguous()
                call(pairs.data_ptr(), table.data_ptr(), to.data_ptr(), rows, inputs, vocab, threads)
            return out

        return product


def make_linear(num_threads: int, cache_dir: Path | None = None) -> NativeLinear | None:
    """The native form, or None without a compiler (said once in the log) or on a processor without AMX."""
    lib = native_build.load(library(), cache_dir)
    if lib is None or not native_levels.levels_of(lib, _ENTRY):
        return None
    return NativeLinear(lib, None, num_threads)
