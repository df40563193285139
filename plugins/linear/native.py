"""The native CPU forms of `linear`: bf16 on AMX tiles; bf16 and INT8 weights on vector registers.

What a form has no kernel for it leaves to the next: AMX tiles, vector registers, torch.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from plugins import native_build, native_levels
from plugins.bound import Bound, bound
from plugins.linear.cpu import TorchLinear, has_fast_bf16
from plugins.linear.params import Int8Weight, LinearForm, Product, Weight
from plugins.native_build import Library
from plugins.native_levels import DTYPE_CODES, Level

_ENTRY = "commitkv_linear"
_WIDE_ENTRY = "commitkv_wide_linear"
_TILE_ROWS = 16
_POINTER, _SIZE, _CODE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


def library(flags: tuple[str, ...] = (), levels: tuple[Level, ...] = ("amx",)) -> Library:
    """What native_build compiles."""
    kernel = Path(__file__).resolve().parent / "cpu_kernel.cpp"
    return native_levels.level_library("linear", kernel, levels, flags=flags)


def pack_int8(codes: torch.Tensor) -> torch.Tensor:
    """[out, in] int8 -> [out / 16, in / 2, 16, 2]: pairs of inputs, in the order they are read."""
    outputs, inputs = codes.shape
    return codes.view(outputs // 16, 16, inputs // 2, 2).transpose(1, 2).contiguous()


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] bf16 -> [out / 16, in / 32, 16, 16, 2]: tiles of pairs of inputs, in the order they are read."""
    outputs, inputs = weight.shape
    return weight.view(outputs // 16, 16, inputs // 32, 16, 2).permute(0, 2, 3, 1, 4).contiguous()


def wide_library(flags: tuple[str, ...] = (), levels: tuple[Level, ...] = ("portable", "avx2", "avx512")) -> Library:
    """What native_build compiles for vector registers."""
    kernel = Path(__file__).resolve().parent / "cpu_wide.cpp"
    return native_levels.level_library("linear_wide", kernel, levels, flags=flags)


class _Room(threading.local):
    """Memory in which the kernel holds x as it multiplies it. Kept: to ask for it takes longer than to fill it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def for_values(self, count: int) -> torch.Tensor:
        """At least `count` floats, of this thread alone."""
        if self._memory.numel() < count:
            self._memory = torch.empty(count)
        return self._memory


class WideLinear:
    """`plugins.linear.params.LinearForm` for bf16 and INT8 weights. A row's bits depend on the level and the row."""

    def __init__(self, lib: ctypes.CDLL, level: Level | None, num_threads: int) -> None:
        """Raises ValueError for a level that this processor or this build does not have."""
        chosen = native_levels.choose_level(native_levels.levels_of(lib, _WIDE_ENTRY), level)
        self._linear, self._logits = (
            getattr(lib, f"{name}_{chosen}") for name in (_WIDE_ENTRY, "commitkv_wide_logits")
        )
        self._linear.restype = self._logits.restype = None
        self._linear.argtypes = (*(_POINTER,) * 6, _CODE, *(_SIZE,) * 3, _CODE)
        self._logits.argtypes = (*(_POINTER,) * 5, _CODE, *(_SIZE,) * 3, _CODE)
        self._threads, self._room = num_threads, _Room()
        self._other = TorchLinear()

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Product:
        dense = weight.codes if isinstance(weight, Int8Weight) else weight
        outputs, inputs = dense.shape
        if dense.dtype not in (torch.bfloat16, torch.int8) or inputs % 32 or outputs % 16:
            return self._other.linear(weight, bias)
        scale = weight.scale if isinstance(weight, Int8Weight) else None
        packed = pack(dense) if scale is None else pack_int8(dense)
        wide = None if bias is None else bias.float()
        return _WideProduct(self._linear, self._threads, self._room, (inputs, outputs), (packed, scale, wide))

    def logits(self, table: Weight) -> Product:
        dense = table.codes if isinstance(table, Int8Weight) else table
        vocab, inputs = dense.shape
        if dense.dtype not in (torch.bfloat16, torch.int8) or inputs % 32 or vocab < 4 or not dense.is_contiguous():
            return self._other.logits(table)
        scale = table.scale if isinstance(table, Int8Weight) else None
        call, threads, room = self._logits, self._threads, self._room

        def product(x: torch.Tensor) -> torch.Tensor:
            assert x.shape[1] == inputs and x.dtype in (torch.bfloat16, torch.float32)
            x, rows = x.contiguous(), x.shape[0]
            out, work = torch.empty((rows, vocab)), room.for_values(rows * inputs)
            scale_at = None if scale is None else scale.data_ptr()
            call(
                x.data_ptr(), dense.data_ptr(), scale_at, out.data_ptr(), work.data_ptr(), DTYPE_CODES[x.dtype],
                rows, inputs, vocab, threads,
            )  # fmt: skip
            return out

        return product


class _WideProduct:
    """A product of `WideLinear`."""

    def __init__(
        self,
        call: Callable[..., None],
        threads: int,
        room: _Room,
        shape: tuple[int, int],
        weight: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    ) -> None:
        """shape: inputs, outputs.   weight: packed; scales of INT8; bias in fp32."""
        self._call, self._threads, self._room, self._weight = call, threads, room, weight
        self._inputs, self.num_outputs = shape
        self._addresses = tuple(None if part is None else part.data_ptr() for part in weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty((x.shape[0], self.num_outputs), dtype=x.dtype)
        self.bind(x, out)()
        return out

    def bind(self, x: torch.Tensor, out: torch.Tensor) -> Bound:
        """See `plugins.bound.BindsProduct`; on the thread that is to call it."""
        rows, inputs = x.shape
        assert x.is_contiguous() and inputs == self._inputs and x.dtype in (torch.bfloat16, torch.float32)
        work = self._room.for_values(rows * inputs)
        return bound(
            self._call, x.data_ptr(), *self._addresses, out.data_ptr(), work.data_ptr(), DTYPE_CODES[x.dtype], rows,
            inputs, self.num_outputs, self._threads, alive=(x, work, out, self),
        )  # fmt: skip


class _TileProduct:
    """A product of `NativeLinear`."""

    def __init__(
        self, call: Callable[..., None], threads: int, packed: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """packed [out / 16, in / 32, 16, 16, 2] bf16, bias [out] fp32."""
        self._call, self._threads, self._packed, self._bias = call, threads, packed, bias
        self._inputs, self.num_outputs = packed.shape[1] * 32, packed.shape[0] * 16

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty((x.shape[0], self.num_outputs), dtype=torch.bfloat16)
        self.bind(x, out)()
        return out

    def bind(self, x: torch.Tensor, out: torch.Tensor) -> Bound:
        """See `plugins.bound.BindsProduct`."""
        rows, inputs = x.shape
        assert x.is_contiguous() and x.dtype == out.dtype == self._packed.dtype and inputs == self._inputs
        bias_at = None if self._bias is None else self._bias.data_ptr()
        return bound(
            self._call, x.data_ptr(), self._packed.data_ptr(), bias_at, out.data_ptr(), rows, inputs, self.num_outputs,
            self._threads, alive=(x, out, self),
        )  # fmt: skip


class NativeLinear:
    """`plugins.linear.params.LinearForm` on AMX tiles. A row's bits depend on nothing but the row."""

    def __init__(self, lib: ctypes.CDLL, num_threads: int, other: LinearForm) -> None:
        """Raises ValueError on a processor without AMX."""
        chosen = native_levels.choose_level(native_levels.levels_of(lib, _ENTRY), None)
        self._linear, self._logits = (getattr(lib, f"{name}_{chosen}") for name in (_ENTRY, "commitkv_logits"))
        self._linear.restype = self._logits.restype = None
        self._linear.argtypes = (*(_POINTER,) * 4, *(_SIZE,) * 3, _CODE)
        self._logits.argtypes = (*(_POINTER,) * 3, *(_SIZE,) * 3, _CODE)
        self._threads = num_threads
        self._other = other

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Product:
        if isinstance(weight, Int8Weight) or weight.dtype != torch.bfloat16:
            return self._other.linear(weight, bias)
        outputs, inputs = weight.shape
        if inputs % 32 or outputs % 16:
            return self._other.linear(weight, bias)
        return _TileProduct(self._linear, self._threads, pack(weight), None if bias is None else bias.float())

    def logits(self, table: Weight) -> Product:
        if isinstance(table, Int8Weight) or table.dtype != torch.bfloat16:
            return self._other.logits(table)
        vocab, inputs = table.shape
        if inputs % 32 or vocab < _TILE_ROWS or not table.is_contiguous():
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


def make_linear(num_threads: int, cache_dir: Path | None = None) -> LinearForm | None:
    """The best native form, or None without a compiler (said once in the log)."""
    wide = native_build.load(wide_library(), cache_dir)
    if wide is None:
        return None
    form = WideLinear(wide, None, num_threads)
    tiles = native_build.load(library(), cache_dir)
    if tiles is None or not native_levels.levels_of(tiles, _ENTRY):
        return form
    return NativeLinear(tiles, num_threads, form)


def runs_bf16() -> bool:
    """Whether this machine multiplies bf16 weights as fast as it reads them; without that fp32 is the faster dtype."""
    if has_fast_bf16():
        return True
    lib = native_build.load(wide_library()) if native_build.find_compiler() else None
    return lib is not None and native_levels.levels_of(lib, _WIDE_ENTRY)[-1] != "portable"
