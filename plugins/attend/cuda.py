"""`attend` on a GPU, or emulated: the kernels of attend.cu, launches over addresses, and the form over tensors.

A layer takes these launches, each only where its list has tiles:
    attend_tiles and attend_combine with 16 query rows a tile   sequences whose rows and query heads fit 16: decode
    attend_tiles and attend_combine with 64                     longer chunks
    score_tiles                                                 recording rows of those chunks (plugins/score/cuda.py)
All read their tile lists from device memory and have a fixed grid, so that a captured graph replays with new tables.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from plugins.attend.params import AttendParams, AttendStep, StepTables
from plugins.attend.tiles import TileLists, TilePlan, split_rows
from plugins.kernel import Kernel, KernelRunner, Launch
from plugins.kv_launch import (
    ResidentBlocks,
    StagedTiles,
    check_addresses,
    check_queries,
    kv_args,
    kv_shape,
    put_tables,
    set_layer,
    single_layer,
)
from plugins.kv_tiles import (
    NUM_CONSUMERS,
    ROW_SUM_BYTES,
    THREADS,
    KvArgs,
    KvShape,
    Residency,
    SharedPlan,
    kernel_defines,
    residency,
)
from plugins.memory import KvMemory
from plugins.score.cuda import ScoreArgs, ScoreKernel, launch_score
from plugins.staging import TableStaging

SOURCE = Path(__file__).resolve().parent / "attend.cu"
DECODE_ROWS, CHUNK_ROWS = 16, 64  # query rows of a tile
COMBINE_THREADS, COMBINE_BLOCKS = 128, 4  # of a block; blocks of a multiprocessor
LOGIT_BYTES = 64  # what a tile's place for logits is counted in
WORKSPACE = ("lse", "parts", "part_sums", "logits")


class AttendArgs(ctypes.Structure):
    """AttendArgs of attend.cu: addresses on the runner's device, of one layer."""

    _fields_ = (
        ("kv", KvArgs),
        *((name, ctypes.c_void_p) for name in ("q", "out", "lse", "seen", "score", "record", "record_skip")),
        *((name, ctypes.c_void_p) for name in ("tiles", "block_tiles", "parts", "part_sums", "logits")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("num_stages", "num_ranges")),
    )


@dataclass(frozen=True)
class AttendKernel:
    """attend.cu for one geometry and tile height, on one architecture."""

    shape: KvShape
    query_rows: int
    sm: str

    @cached_property
    def plan(self) -> SharedPlan:
        splits = self.query_rows == DECODE_ROWS
        extra = (
            ("ROW_LIMITS_AT", 8 * self.query_rows),
            ("MERGE_SUMS_AT", NUM_CONSUMERS * DECODE_ROWS * ROW_SUM_BYTES if splits else 0),
            ("MERGE_AT", DECODE_ROWS * self.shape.page.head_dim * 4 if splits else 0),
        )
        return SharedPlan.of(self.shape, self.query_rows, extra)

    @cached_property
    def kernel(self) -> Kernel:
        return Kernel("attend", SOURCE, kernel_defines(self.shape, self.query_rows, self.plan, self.sm))

    @cached_property
    def residency(self) -> Residency:
        """Raises UnsupportedShapeError where a page or block does not fit shared memory."""
        return residency(self.shape, self.plan, self.sm)

    def num_ranges(self, num_multiprocessors: int) -> int:
        """Blocks of attend_tiles, and what its tile list must be built for."""
        return self.residency.blocks * num_multiprocessors

    def part_bytes(self, num_tiles: int) -> tuple[int, int]:
        """Workspace for so many tiles: bytes of `parts` and of `part_sums`."""
        rows = num_tiles * self.query_rows
        return rows * self.shape.page.head_dim * 4, rows * ROW_SUM_BYTES


def launch_attend(runner: KernelRunner, kernel: AttendKernel, args: AttendArgs, stream: int | None = None) -> None:
    """Launches attend_tiles and attend_combine. Sets args.num_stages and args.num_ranges; every address must be set.

    Raises LaunchError for addresses that are not 16-byte aligned, before anything is launched.
    """
    args.num_stages = kernel.residency.num_stages
    args.num_ranges = kernel.num_ranges(runner.num_multiprocessors)
    check_addresses({"pages": args.kv.pages, "blocks": args.kv.blocks, "q": args.q, "out": args.out})
    check_addresses({"tiles": args.tiles, "parts": args.parts, "part_sums": args.part_sums, "logits": args.logits})
    tiles = Launch(args.num_ranges, THREADS, kernel.residency.shared_bytes)
    runner.run(kernel.kernel, "attend_tiles", tiles, args, stream)
    combine = Launch(COMBINE_BLOCKS * runner.num_multiprocessors, COMBINE_THREADS, 4 * kernel.query_rows)
    runner.run(kernel.kernel, "attend_combine", combine, args, stream)


class CudaAttend:
    """`plugins.attend.params.AttendForm` over tensors of the runner's device, tables on the host.

    Steps begun between two flushes may run in turn, layer by layer. Tables go down through `staging`: `begin` puts
    them, and whoever began the staging flushes it before the steps run. Block lists stay on the device until they
    change.
    """

    def __init__(self, runner: KernelRunner, staging: TableStaging, group: int, sm: str = "sm_90a") -> None:
        """group: query heads per KV head. sm: what the kernels run on; it decides how much shared memory they take."""
        self._runner, self._staging, self._group, self._sm = runner, staging, group, sm
        self._workspace = _Workspace(runner.device)
        self._resident = ResidentBlocks(runner.device)
        self._lists = TileLists()

    def __call__(self, params: AttendParams) -> None:
        """One layer by itself: writes params.out, raises params.seen and params.score."""
        memory, tables = single_layer(params)
        self._staging.begin()
        step = self.begin(memory, tables, params.scale)
        self._staging.flush()
        step(0, params.q, params.out)

    def begin(self, memory: KvMemory, tables: StepTables, scale: float) -> AttendStep:
        """Raises UnsupportedShapeError for types and sizes that no kernel was written for."""
        shape = kv_shape(memory, self._group)
        kernels = _Kernels(
            AttendKernel(shape, DECODE_ROWS, self._sm),
            AttendKernel(shape, CHUNK_ROWS, self._sm),
            ScoreKernel(shape, self._sm),
        )
        kv_heads, processors = memory.pages[0].shape[1], self._runner.num_multiprocessors
        plans = [TilePlan(shape, kv_heads, rows, ranges) for rows, ranges in kernels.tile_plans(processors)]
        lists = [
            StagedTiles.of(self._lists.build(tables, rows, plan), rows, self._staging)
            for rows, plan in zip(split_rows(tables, self._group), plans, strict=True)
        ]
        device_tables = put_tables(tables, self._staging, self._resident.of(tables.blocks))
        num_queries = tables.record.shape[0] * kv_heads * self._group
        self._workspace.reserve(kernels, lists, num_queries)
        step = _Step(self._runner, memory, device_tables, kernels, self._workspace)
        step.prepare(lists, scale)
        return step.run


@dataclass(frozen=True)
class _Kernels:
    decode: AttendKernel
    chunk: AttendKernel
    score: ScoreKernel

    def tile_plans(self, num_multiprocessors: int) -> list[tuple[int, int]]:
        """Query rows of a tile and number of ranges, in the order of `split_rows`."""
        decode, chunk, score = (k.num_ranges(num_multiprocessors) for k in (self.decode, self.chunk, self.score))
        return [(self.decode.query_rows, decode), (self.chunk.query_rows, chunk), (self.score.query_rows, score)]


class _Workspace:
    """Buffers that the layers of a step share, since they run in order. They grow, and stay."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def reserve(self, kernels: _Kernels, lists: list[StagedTiles], num_queries: int) -> None:
        attends = zip((kernels.decode, kernels.chunk), lists, strict=False)
        bytes_of = [kernel.part_bytes(part.max_tiles) for kernel, part in attends]
        self._grow("parts", max(parts for parts, _ in bytes_of))
        self._grow("part_sums", max(sums for _, sums in bytes_of))
        self._grow("logits", max(part.num_logits for part in lists) * LOGIT_BYTES)
        self._grow("lse", num_queries * 4)

    def address(self, name: str) -> int:
        return self._buffers[name].data_ptr()

    def _grow(self, name: str, num_bytes: int) -> None:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < num_bytes:
            self._buffers[name] = torch.empty(max(num_bytes, 16), dtype=torch.uint8, device=self._device)


class _Step:
    """The launches of a step's layers, over argument records of which a layer changes a few fields."""

    def __init__(
        self, runner: KernelRunner, memory: KvMemory, tables: StepTables, kernels: _Kernels, workspace: _Workspace
    ) -> None:
        self._runner, self._memory, self._tables, self._kernels = runner, memory, tables, kernels
        self._workspace = workspace
        self._attends: list[tuple[AttendKernel, StagedTiles]] = []
        self._scored: StagedTiles | None = None
        self._args, self._score_args = AttendArgs(), ScoreArgs()

    def prepare(self, lists: list[StagedTiles], scale: float) -> None:
        """lists: in the order of `split_rows`; the workspace must be reserved for them."""
        decode, chunk, scored = lists
        pairs = ((self._kernels.decode, decode), (self._kernels.chunk, chunk))
        self._attends = [(kernel, tiles) for kernel, tiles in pairs if tiles.max_tiles]
        self._scored = scored if scored.max_tiles else None
        kv = kv_args(self._memory, self._tables, self._kernels.decode.shape.group)
        args, score_args = self._args, self._score_args
        args.kv, score_args.kv = kv, kv
        args.scale, score_args.scale = scale, scale
        args.record, args.record_skip = self._tables.record.data_ptr(), self._tables.record_skip.data_ptr()
        args.score = score_args.score = self._memory.score.data_ptr()
        score_args.record_skip = args.record_skip
        if scored.rows is not None:
            score_args.score_rows = scored.rows.data_ptr()

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """`AttendStep`. Raises LaunchError for rows of another type, shape or device than the step's."""
        memory, args = self._memory, self._args
        queries = (self._tables.record.shape[0], memory.pages[0].shape[1] * self._kernels.decode.shape.group)
        check_queries(q, "q", memory, queries)
        check_queries(out, "out", memory, queries)
        set_layer(args.kv, memory, self._tables, layer)
        args.q, args.out, args.seen = q.data_ptr(), out.data_ptr(), memory.addresses[layer][1]
        for name in WORKSPACE:  # which a step begun later may have moved
            setattr(args, name, self._workspace.address(name))
        for kernel, tiles in self._attends:
            args.tiles, args.block_tiles = tiles.addresses(layer)
            launch_attend(self._runner, kernel, args)
        if self._scored is not None:
            score_args = self._score_args
            set_layer(score_args.kv, memory, self._tables, layer)
            score_args.q, score_args.seen, score_args.lse = args.q, args.seen, args.lse
            score_args.tiles, score_args.block_tiles = self._scored.addresses(layer)
            launch_score(self._runner, self._kernels.score, score_args)
