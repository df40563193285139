"""The native CPU form of `publish`, the second half of a commit."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from plugins import native_build, native_levels
from plugins.commit.params import TINY_WEIGHT, Decision, PublishParams, RowTable
from plugins.commit.publish import check_tables
from plugins.memory import KvMemory
from plugins.native_build import Library
from plugins.native_levels import DTYPE_CODES, FORMAT_CODES, VECTOR_LEVELS, Level

_ENTRY = "commitkv_publish"
_POINTERS = ("pages", "seen", "blocks", "score", "staged",
             "old_starts", "old_ids", "old_lens", "made_starts", "made_ids", "made_lens", "dissolve", "is_new",
             "staged_keep", "staged_score", "alive", "move_from", "move_to")  # fmt: skip
_BLOCK = ("block_entries", "block_bytes", "v_codes", "k_scale", "k_min", "v_scale", "v_min", "bias")
_SIZES = ("num_staged", "num_moves", "num_rows", "kv_heads", "head_dim", "page_tokens", *_BLOCK, "absorbed", "dropped")
_CODES = ("page_dtype", "block_format", "threads", "absorb")


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
    kernel = Path(__file__).resolve().parent / "cpu_kernel.cpp"
    return native_levels.level_library("commit", kernel, levels, flags=("-ffp-contract=off", *flags))


class NativePublish:
    """`publish` on the CPU. Bits depend on the level, not on the number of threads."""

    def __init__(self, lib: ctypes.CDLL, level: Level | None, num_threads: int) -> None:
        """Raises ValueError for a level that this processor or this build does not have."""
        chosen = native_levels.choose_level(native_levels.levels_of(lib, _ENTRY), level)
        self._call = getattr(lib, f"{_ENTRY}_{chosen}")
        self._call.argtypes, self._call.restype = (ctypes.c_void_p,), ctypes.c_int32
        self._threads = num_threads

    def __call__(self, memory: KvMemory, params: PublishParams, decision: Decision) -> tuple[int, int]:
        """Writes new blocks, merges into those that stay, copies moved tokens; returns (absorbed, dropped) counts."""
        check_tables(memory, params, decision)
        args = _geometry(memory)
        alive: list[object] = []  # what the pointers in `args` point to
        pages, seen = ((ctypes.c_void_p * len(memory.pages))(*column) for column in zip(*memory.addresses, strict=True))
        alive += [pages, seen]
        args.pages, args.seen = ctypes.addressof(pages), ctypes.addressof(seen)
        tensors = {
            "staged": params.staged, "dissolve": params.dissolve, "is_new": params.is_new,
            "staged_keep": decision.staged_keep, "staged_score": decision.staged_score, "alive": decision.alive,
            "move_from": params.move_from, "move_to": params.move_to,
            **_columns("old", params.old), **_columns("made", params.new),
        }  # fmt: skip
        for name, tensor in tensors.items():
            held = tensor.contiguous()
            alive.append(held)
            setattr(args, name, held.data_ptr())
        args.num_staged, args.num_moves = params.staged.shape[0], params.move_from.shape[0]
        args.threads, args.tiny_weight = self._threads, TINY_WEIGHT
        args.absorb, args.gate = params.absorb_gate is not None, params.absorb_gate or 0.0
        if self._call(ctypes.addressof(args)) != 0:
            raise MemoryError("publish: no memory for its scratch; commit fewer tokens at once")
        return int(args.absorbed), int(args.dropped)


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
    args.page_dtype, args.block_format = DTYPE_CODES[memory.pages[0].dtype], FORMAT_CODES[memory.layout.format]
    return args


def make_publish(num_threads: int, level: Level | None = None, cache_dir: Path | None = None) -> NativePublish | None:
    """The native form, or None without a compiler (said once in the log). level: None for the processor's best."""
    lib = native_build.load(library(), cache_dir)
    return None if lib is None else NativePublish(lib, level, num_threads)
