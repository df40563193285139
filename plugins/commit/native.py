"""The native CPU forms of a commit's halves: `draw_line` and `publish`."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from plugins import native_build, native_levels
from plugins.commit.entries import TINY_WEIGHT
from plugins.commit.line import draw_line as torch_draw_line
from plugins.commit.params import Decision, LineParams, PublishParams, RowTable
from plugins.commit.publish import check_tables
from plugins.commit.publish import publish as torch_publish
from plugins.memory import KvMemory
from plugins.native_build import Library, Unit
from plugins.native_levels import DTYPE_CODES, FORMAT_CODES, VECTOR_LEVELS, Level

_ENTRY = "commitkv_publish"
_POINTERS = ("pages", "seen", "blocks", "score", "staged",
             "old_starts", "old_ids", "old_lens", "made_starts", "made_ids", "made_lens", "dissolve", "is_new",
             "marks", "staged_score", "alive", "move_from", "move_to")  # fmt: skip
_BLOCK = ("block_entries", "block_bytes", "v_codes", "k_scale", "k_min", "v_scale", "v_min", "bias")
_SIZES = ("num_staged", "num_moves", "num_rows", "kv_heads", "head_dim", "page_tokens", *_BLOCK, "absorbed", "dropped")
_CODES = ("page_dtype", "k_format", "v_format", "threads", "absorb")


_LINE_POINTERS = ("seen", "score", "staged", "old_starts", "old_ids", "old_lens", "layer_scale",
                  "staged_keep", "staged_score", "alive")  # fmt: skip
_LINE_SIZES = ("num_staged", "num_rows", "kv_heads", "page_tokens", "block_entries", "keep_entries", "floor_entries")


class _LineArgs(ctypes.Structure):
    """Mirrors commitkv::LineArgs of cpu_line.cpp field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _LINE_POINTERS),
        *((name, ctypes.c_int64) for name in _LINE_SIZES),
        ("outliers", ctypes.c_int32),
        ("outlier_z", ctypes.c_float),
        ("line", ctypes.c_float),
    )


class _Args(ctypes.Structure):
    """Mirrors commitkv::CommitArgs of cpu_plan.hpp field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_int32) for name in _CODES),
        ("gate", ctypes.c_float),
        ("tiny_weight", ctypes.c_float),
    )


def library(flags: tuple[str, ...] = (), levels: tuple[Level, ...] = VECTOR_LEVELS) -> Library:
    """What native_build compiles. Products are not fused with sums, so that codes are those of the torch form."""
    here = Path(__file__).resolve().parent
    entry = (Unit(here / "cpu_line.cpp"),)
    flags = ("-ffp-contract=off", *flags)
    return native_levels.level_library("commit", here / "cpu_kernel.cpp", levels, entry, flags)


class NativeLine:
    """`draw_line` on the CPU, with one thread. Params that are not plain go to the torch form."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self._call = lib.commitkv_draw_line
        self._call.argtypes, self._call.restype = (ctypes.c_void_p,), ctypes.c_int32

    def __call__(self, memory: KvMemory, params: LineParams) -> Decision:
        """Decides which staged tokens and old entries stay: max(keep_entries, forced by floor and protection)."""
        if not params.plain:
            return torch_draw_line(memory, params)
        _, kv_heads, _, page_tokens, _ = memory.pages[0].shape
        rows, size, count = memory.num_rows, memory.layout.block_entries, params.staged.shape[0]
        keep, score = torch.empty((rows, count), dtype=torch.bool), torch.empty((rows, count))
        alive = torch.empty((params.table.ids.shape[0], size), dtype=torch.bool)
        seen = (ctypes.c_void_p * len(memory.seen))(*(seen for _, seen in memory.addresses))
        args = _LineArgs(num_staged=count, num_rows=rows, kv_heads=kv_heads, page_tokens=page_tokens)
        args.seen, args.block_entries = ctypes.addressof(seen), size
        args.keep_entries, args.floor_entries = params.keep_entries, params.floor_entries
        args.outliers, args.outlier_z = params.outlier_z is not None, params.outlier_z or 0.0
        layer_scale = torch.tensor(params.layer_scale or (1.0,) * len(memory.pages), dtype=torch.float32)
        held = _point(args, {
            "score": memory.score, "staged": params.staged, "layer_scale": layer_scale, "staged_keep": keep,
            "staged_score": score, "alive": alive, **_columns("old", params.table),
        })  # fmt: skip
        if self._call(ctypes.addressof(args)) != 0:
            raise MemoryError("draw_line: no memory for its scratch; commit fewer tokens at once")
        del held
        return Decision(float(args.line), keep, score, alive)


class NativePublish:
    """`publish` on the CPU. Bits depend on the level, not on the number of threads.

    Decisions with super tokens, and blocks whose keys have two widths, go to the torch form.
    """

    def __init__(self, lib: ctypes.CDLL, level: Level | None, num_threads: int) -> None:
        """Raises ValueError for a level that this processor or this build does not have."""
        chosen = native_levels.choose_level(native_levels.levels_of(lib, _ENTRY), level)
        self._call = getattr(lib, f"{_ENTRY}_{chosen}")
        self._call.argtypes, self._call.restype = (ctypes.c_void_p,), ctypes.c_int32
        self._threads = num_threads

    def __call__(self, memory: KvMemory, params: PublishParams, decision: Decision) -> tuple[int, int]:
        """Writes new blocks, merges into those that stay, copies moved tokens; returns (absorbed, dropped) counts."""
        if decision.pooling is not None or memory.layout.mixed:
            return torch_publish(memory, params, decision)
        check_tables(memory, params, decision)
        args = _geometry(memory)
        pages, seen = ((ctypes.c_void_p * len(memory.pages))(*column) for column in zip(*memory.addresses, strict=True))
        args.pages, args.seen = ctypes.addressof(pages), ctypes.addressof(seen)
        held = _point(args, {
            "staged": params.staged, "dissolve": params.dissolve, "is_new": params.is_new,
            "marks": decision.marks, "staged_score": decision.staged_score, "alive": decision.alive,
            "move_from": params.move_from, "move_to": params.move_to,
            **_columns("old", params.old), **_columns("made", params.new),
        })  # fmt: skip
        args.num_staged, args.num_moves = params.staged.shape[0], params.move_from.shape[0]
        args.threads, args.tiny_weight = self._threads, TINY_WEIGHT
        args.absorb, args.gate = params.absorb_gate is not None, params.absorb_gate or 0.0
        if self._call(ctypes.addressof(args)) != 0:
            raise MemoryError("publish: no memory for its scratch; commit fewer tokens at once")
        del held
        return int(args.absorbed), int(args.dropped)


def _point(args: ctypes.Structure, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Sets pointers; the tensors returned must live until the call is over."""
    held = [tensor.contiguous() for tensor in tensors.values()]
    for name, tensor in zip(tensors, held, strict=True):
        setattr(args, name, tensor.data_ptr())
    return held


def _columns(name: str, table: RowTable) -> dict[str, torch.Tensor]:
    starts = torch.tensor(table.starts, dtype=torch.int64)
    return {f"{name}_starts": starts, f"{name}_ids": table.ids, f"{name}_lens": table.lens}


def _geometry(memory: KvMemory) -> _Args:
    _, kv_heads, _, page_tokens, head_dim = memory.pages[0].shape
    assert head_dim % 8 == 0 and head_dim == memory.layout.head_dim
    args = _Args()
    args.blocks, args.score = memory.blocks.data_ptr(), memory.score.data_ptr()
    args.num_rows, args.kv_heads, args.head_dim, args.page_tokens = memory.num_rows, kv_heads, head_dim, page_tokens
    for name in _BLOCK:
        setattr(args, name, getattr(memory.layout, name))
    args.page_dtype = DTYPE_CODES[memory.pages[0].dtype]
    args.k_format, args.v_format = FORMAT_CODES[memory.layout.format]
    return args


def make_commit(
    num_threads: int, level: Level | None = None, cache_dir: Path | None = None
) -> tuple[NativeLine, NativePublish] | None:
    """Both halves, or None without a compiler (said once in the log). level: None for the processor's best."""
    lib = native_build.load(library(), cache_dir)
    return None if lib is None else (NativeLine(lib), NativePublish(lib, level, num_threads))
