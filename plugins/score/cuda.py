"""`score` on a GPU, or emulated: the kernel of score.cu, its launch over addresses, and the form over tensors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from plugins.attend.tiles import TilePlan, recorded_rows
from plugins.kernel import Kernel, KernelRunner, Launch
from plugins.kv_launch import (
    StagedTiles,
    check_addresses,
    check_queries,
    kv_args,
    kv_shape,
    put_tables,
    set_layer,
    single_layer,
)
from plugins.kv_tiles import THREADS, KvArgs, KvShape, Residency, SharedPlan, kernel_defines, residency
from plugins.score.params import ScoreParams
from plugins.staging import TableStaging

SOURCE = Path(__file__).resolve().parent / "score.cu"
QUERY_ROWS = 64  # of a tile


class ScoreArgs(ctypes.Structure):
    """ScoreArgs of score.cu: addresses on the runner's device, of one layer."""

    _fields_ = (
        ("kv", KvArgs),
        *((name, ctypes.c_void_p) for name in ("q", "lse", "seen", "score", "score_rows", "record_skip")),
        *((name, ctypes.c_void_p) for name in ("tiles", "block_tiles")),
        ("scale", ctypes.c_float),
        ("num_stages", ctypes.c_int32),
    )


@dataclass(frozen=True)
class ScoreKernel:
    """score.cu for one geometry, on one architecture."""

    shape: KvShape
    sm: str
    query_rows: int = QUERY_ROWS

    @cached_property
    def plan(self) -> SharedPlan:
        extra = (("ROW_LSE_AT", 4 * self.query_rows), ("ROW_LIMITS_AT", 4 * self.query_rows))
        return SharedPlan.of(self.shape, self.query_rows, extra)

    @cached_property
    def kernel(self) -> Kernel:
        return Kernel("score", SOURCE, kernel_defines(self.shape, self.query_rows, self.plan, self.sm))

    @cached_property
    def residency(self) -> Residency:
        """Raises UnsupportedShapeError where a page or block does not fit shared memory."""
        return residency(self.shape, self.plan, self.sm)

    def num_ranges(self, num_multiprocessors: int) -> int:
        """Blocks of score_tiles, and what its tile list must be built for."""
        return self.residency.blocks * num_multiprocessors


def launch_score(runner: KernelRunner, kernel: ScoreKernel, args: ScoreArgs, stream: int | None = None) -> None:
    """Launches score_tiles with a fixed grid. Sets args.num_stages; every address must be set.

    Raises LaunchError for addresses that are not 16-byte aligned, before anything is launched.
    """
    args.num_stages = kernel.residency.num_stages
    check_addresses({"pages": args.kv.pages, "blocks": args.kv.blocks, "q": args.q, "score tiles": args.tiles})
    launch = Launch(kernel.num_ranges(runner.num_multiprocessors), THREADS, kernel.residency.shared_bytes)
    runner.run(kernel.kernel, "score_tiles", launch, args, stream)


class CudaScore:
    """`plugins.score.params.ScoreForm` over tensors of the runner's device, tables on the host."""

    def __init__(self, runner: KernelRunner, staging: TableStaging, group: int, sm: str = "sm_90a") -> None:
        """group: query heads per KV head. sm: what the kernel runs on; it decides how much shared memory it takes."""
        self._runner, self._staging, self._group, self._sm = runner, staging, group, sm

    def __call__(self, params: ScoreParams) -> None:
        """Raises LaunchError, and UnsupportedShapeError for types and sizes that no kernel was written for."""
        memory, tables = single_layer(params)
        kernel = ScoreKernel(kv_shape(memory, self._group), self._sm)
        kv_heads = params.pages.shape[1]
        check_queries(params.q, "q", memory, (tables.record.shape[0], kv_heads * self._group))
        plan = TilePlan(kernel.shape, kv_heads, QUERY_ROWS, kernel.num_ranges(self._runner.num_multiprocessors))
        self._staging.begin()
        staged = StagedTiles.put(tables, recorded_rows(tables), plan, self._staging)
        device_tables = put_tables(tables, self._staging)
        self._staging.flush()
        if staged.max_tiles == 0:
            return
        assert staged.rows is not None and params.lse.is_contiguous()
        args = ScoreArgs(kv_args(memory, device_tables, self._group), params.q.data_ptr(), params.lse.data_ptr())
        set_layer(args.kv, memory, device_tables, 0)
        args.seen, args.score, args.scale = params.seen.data_ptr(), params.score.data_ptr(), params.scale
        args.score_rows, args.record_skip = staged.rows.data_ptr(), device_tables.record_skip.data_ptr()
        args.tiles, args.block_tiles = staged.addresses(0)
        launch_score(self._runner, kernel, args)
