"""The second half of a commit, `publish`, on a GPU, or emulated on a CPU: launches commit.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import torch

from plugins.commit.entries import TINY_WEIGHT
from plugins.commit.params import Decision, PublishParams, RowTable
from plugins.commit.publish import check_tables
from plugins.commit.publish import publish as torch_publish
from plugins.errors import LaunchError, UnsupportedShapeError
from plugins.kernel import Kernel, KernelRunner, Launch
from plugins.layout import ELEMENT_BYTES, BlockLayout, Element, PageLayout, geometry_defines
from plugins.memory import KvMemory

ENTRY = "commit_rows"
THREADS = 256
MAX_BLOCK_ENTRIES = 128
SHARED_BYTES = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90a": 227 << 10, "sm_120": 99 << 10}
"""Dynamic shared memory that one block may take (CUDA C++ programming guide, technical specifications)."""
SMALLEST_SHARED_BYTES = min(SHARED_BYTES.values())
RESERVED_BYTES = 1024  # of every resident block, by the system
MIN_QUERY_ROWS = 32
STAGES = (4, 3, 2)
MAX_CACHED_BLOCKS = 32
_ELEMENT_DTYPES: dict[torch.dtype, Element] = {torch.float16: "fp16", torch.bfloat16: "bf16"}

_POINTERS = ("layer_pages", "layer_seen", "blocks", "score", "staged", "old_starts", "old_ids", "old_lens",
             "new_starts", "new_ids", "new_lens", "dissolve", "is_new", "alive", "marks", "staged_score",
             "move_from", "move_to", "workspace", "counts")  # fmt: skip
_COUNTS = ("num_staged", "num_moves", "num_rows", "kv_heads", "num_slots", "num_blocks", "max_moving",
           "max_old_blocks", "workspace_words", "num_stages", "query_rows", "cached_blocks", "absorb")  # fmt: skip
_OFFSETS = ("at_stages", "at_work", "at_image", "at_partials", "at_squares", "at_best", "at_norms", "at_scales",
            "at_queries", "at_sums", "at_barriers")  # fmt: skip


class CudaCommitParams(ctypes.Structure):
    """CommitParams of commit_params.cuh field by field. `plan_commit` fills in what follows from sizes."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int32) for name in _COUNTS),
        ("gate", ctypes.c_float),
        ("tiny_weight", ctypes.c_float),
        *((name, ctypes.c_int32) for name in _OFFSETS),
    )


@dataclass(frozen=True)
class CommitSizes:
    """Bounds on what one launch meets.

    rows: layers * G.   Of any one row: moving: staged tokens and filled entries of dissolved blocks; below: those of
    them below the line, 0 without a gate; old_blocks: blocks before the commit, dissolved_blocks: of them.
    shared_bytes: see SHARED_BYTES.
    """

    rows: int
    moving: int
    below: int
    old_blocks: int
    dissolved_blocks: int
    shared_bytes: int = SMALLEST_SHARED_BYTES


@dataclass(frozen=True)
class CommitPlan:
    """How a launch goes: its grid and shared memory, the workspace it needs, and Params fields by name."""

    launch: Launch
    workspace_bytes: int
    fields: tuple[tuple[str, int], ...]

    @property
    def query_rows(self) -> int:
        """Keys below the line that are searched in one pass over the candidates."""
        return dict(self.fields)["query_rows"]


def commit_kernel(page: PageLayout, block: BlockLayout, element: Element) -> Kernel:
    """The kernel of one geometry. Raises ValueError or UnsupportedShapeError for one that kernels do not have."""
    if block.block_entries > MAX_BLOCK_ENTRIES:
        raise UnsupportedShapeError(
            f"block_entries: got {block.block_entries}, expected at most {MAX_BLOCK_ENTRIES}: a commit works on a "
            f"whole block in shared memory; build with smaller blocks"
        )
    defines = geometry_defines(page, block, element)
    return Kernel("commit", Path(__file__).resolve().parent / "commit.cu", defines)


def plan_commit(block: BlockLayout, sizes: CommitSizes, num_multiprocessors: int) -> CommitPlan:
    """Divides shared memory and the workspace. Raises UnsupportedShapeError where a block does not fit this GPU.

    Two blocks share a multiprocessor where there are rows for both and all keys below the line fit half of its memory,
    with as many stages as fit too; else one block has it to itself; and where the keys do not fit at all they are
    searched slab by slab.
    """
    coded = min(sizes.below, sizes.dissolved_blocks * block.block_entries) if block.quantized else 0
    # Entries of dissolved blocks take a second row, for what their keys have beyond fp16 or bf16.
    wanted = _multiple(max(MIN_QUERY_ROWS, min(sizes.below, sizes.moving) + coded + 16), 32)
    half = (sizes.shared_bytes + RESERVED_BYTES) // 2 - RESERVED_BYTES
    budgets = (half, sizes.shared_bytes) if sizes.rows > num_multiprocessors else (sizes.shared_bytes,)
    for budget, stages in product(budgets, STAGES):
        regions = _regions(block, sizes, stages, wanted)
        if sum(regions.values()) <= budget:
            return _plan(block, sizes, regions, (stages, wanted, budget == half), num_multiprocessors)
    row = _regions(block, sizes, STAGES[-1], 32)["at_queries"] // 32 + 8
    rest = sizes.shared_bytes - sum(_regions(block, sizes, STAGES[-1], 0).values())
    query_rows = rest // row // 32 * 32
    if query_rows < MIN_QUERY_ROWS:
        raise UnsupportedShapeError(
            f"commit: a {block.format} block of {block.block_entries} entries of {block.head_dim} channels needs "
            f"{sizes.shared_bytes - rest + MIN_QUERY_ROWS * row:,} bytes of shared memory, this GPU has "
            f"{sizes.shared_bytes:,}; build with smaller blocks"
        )
    regions = _regions(block, sizes, STAGES[-1], query_rows)
    return _plan(block, sizes, regions, (STAGES[-1], query_rows, False), num_multiprocessors)


def _regions(block: BlockLayout, sizes: CommitSizes, stages: int, query_rows: int) -> dict[str, int]:
    """Bytes of each part of shared memory, multiples of 16. See KeyViews and ValueViews of the kernel."""
    entries, half_row = block.block_entries, 2 * block.head_dim
    tile = entries * (block.head_dim + 8) * 2
    image = max(
        entries * block.k_row_bytes + (4 * block.head_dim if block.quantized else 0),
        entries * block.v_row_bytes + (6 if block.quantized else 2) * entries,
    )
    warps = THREADS // 32
    regions = {
        "at_stages": stages * entries * half_row,
        "at_work": max(tile * (2 if block.quantized else 1), entries * block.head_dim * 4),
        "at_image": image + 2 * entries,
        "at_partials": warps * 2 * block.head_dim * 4 if block.quantized else 0,
        "at_squares": 4 * entries,
        "at_best": 4 * query_rows,
        "at_norms": 4 * query_rows,
        "at_scales": _cached_blocks(block, sizes) * 4 * block.head_dim,
        "at_queries": query_rows * half_row,
        "at_sums": 4 * warps,
        "at_barriers": (STAGES[0] + 1) * 8,
    }
    return {name: _multiple(num_bytes, 16) for name, num_bytes in regions.items()}


def _cached_blocks(block: BlockLayout, sizes: CommitSizes) -> int:
    return min(sizes.dissolved_blocks, MAX_CACHED_BLOCKS) if block.quantized else 0


def _plan(
    block: BlockLayout,
    sizes: CommitSizes,
    regions: Mapping[str, int],
    shape: tuple[int, int, bool],
    num_multiprocessors: int,
) -> CommitPlan:
    """shape: stages, query rows, whether two blocks share a multiprocessor."""
    stages, query_rows, shared = shape
    offsets, total = {}, 0
    for name, num_bytes in regions.items():
        offsets[name] = total
        total += num_bytes
    moving = _multiple(sizes.moving, 4)
    candidates = moving + sizes.old_blocks * block.block_entries + 1
    words = _multiple(11 * moving + 2 * candidates + 3 * sizes.old_blocks, 4)
    grid = max(1, min(sizes.rows, num_multiprocessors * (2 if shared else 1)))
    fields = {
        **offsets, "num_stages": stages, "query_rows": query_rows, "cached_blocks": _cached_blocks(block, sizes),
        "max_moving": moving, "max_old_blocks": sizes.old_blocks, "workspace_words": words,
    }  # fmt: skip
    return CommitPlan(Launch(grid, THREADS, total), max(4, 4 * words * grid), tuple(fields.items()))


def launch_commit(
    runner: KernelRunner, kernel: Kernel, plan: CommitPlan, params: CudaCommitParams, stream: int | None = None
) -> None:
    """Publishes one commit. `params` needs its pointers, sizes, `absorb` and `gate`; counts are added to.

    Nothing is allocated or waited for. No table may name a block or slot to write that another entry of the tables
    reads; see `check_disjoint`.
    """
    for name, value in plan.fields:
        setattr(params, name, value)
    params.tiny_weight = TINY_WEIGHT
    for name in ("blocks", "score", "workspace", "alive"):
        address = getattr(params, name) or 0
        if address % 16:
            raise LaunchError(f"commit: {name} lies at {address:#x}, expected a multiple of 16; align it")
    runner.run(kernel, ENTRY, plan.launch, params, stream)


def check_disjoint(params: PublishParams) -> None:
    """Rows run at the same time, so nothing that is written may be read as something else.

    Raises LaunchError if a new block is one of the old ones or twice in the table, or if a slot that tokens move to is
    staged, moved from, or used twice.
    """
    is_new = params.is_new.tolist()
    new = [i for i, fresh in zip(params.new.ids.tolist(), is_new, strict=True) if fresh and i >= 0]
    old = [i for i in params.old.ids.tolist() if i >= 0]
    move_to = [i for i in params.move_to.tolist() if i >= 0]
    for what, written, read in (
        ("block", new, old),
        ("slot", move_to, params.staged.tolist() + params.move_from.tolist()),
    ):
        shared = set(written) & set(read)
        if shared or len(set(written)) < len(written):
            twice = shared or {i for i in written if written.count(i) > 1}
            raise LaunchError(f"commit: {what} {min(twice)} is to be written while it is read or written elsewhere")


@dataclass(frozen=True)
class CudaPublish:
    """`publish` on the runner's device, for fp16 and bf16 pages.

    shared_bytes: of one block on this GPU, see SHARED_BYTES. Tables may lie on the host or the device. Decisions with
    super tokens (`Decision.pooling`) and blocks whose keys have two widths go to the torch form.
    """

    runner: KernelRunner
    shared_bytes: int = SMALLEST_SHARED_BYTES

    def __call__(self, memory: KvMemory, params: PublishParams, decision: Decision) -> tuple[int, int]:
        """Writes new blocks, merges into those that stay, copies moved tokens; returns (absorbed, dropped) counts.

        Raises LaunchError for memory on another device or plans that are not disjoint, UnsupportedShapeError and
        ValueError for geometry that kernels do not have.
        """
        if decision.pooling is not None or memory.layout.mixed:
            return torch_publish(memory, params, decision)
        check_tables(memory, params, decision)
        check_disjoint(params)
        device = self.runner.device
        if memory.blocks.device != device or memory.pages[0].device != device:
            raise LaunchError(f"commit: the arenas lie on {memory.blocks.device}, expected {device}")
        kernel = self._kernel(memory)
        plan = plan_commit(memory.layout, self._sizes(memory, params, decision), self.runner.num_multiprocessors)
        workspace = torch.empty(plan.workspace_bytes // 4, dtype=torch.int32, device=device)
        counts = torch.zeros(2, dtype=torch.int32, device=device)
        tensors = {**_tensors(memory, params, decision, device), "workspace": workspace, "counts": counts}
        launch_commit(self.runner, kernel, plan, _fill(memory, params, tensors))
        absorbed, dropped = counts.tolist()
        return absorbed, dropped

    def _kernel(self, memory: KvMemory) -> Kernel:
        _, kv_heads, _, page_tokens, head_dim = memory.pages[0].shape
        element = _ELEMENT_DTYPES.get(memory.pages[0].dtype)
        if element is None:
            raise LaunchError(f"commit: pages are {memory.pages[0].dtype}, expected float16 or bfloat16 on a GPU")
        page = PageLayout(len(memory.pages), kv_heads, head_dim, page_tokens, ELEMENT_BYTES)
        return commit_kernel(page, memory.layout, element)

    def _sizes(self, memory: KvMemory, params: PublishParams, decision: Decision) -> CommitSizes:
        starts = torch.tensor(params.old.starts)
        row = torch.arange(memory.num_rows).repeat_interleave(starts.diff())
        gone, lens = params.dissolve.cpu(), params.old.lens.cpu()
        zeros = torch.zeros(memory.num_rows, dtype=torch.int64)
        filled = zeros.index_add(0, row[gone], lens[gone])
        alive = zeros.index_add(0, row[gone], decision.alive.sum(dim=1).cpu()[gone])
        kept = decision.staged_keep.sum(dim=1).cpu()
        staged = params.staged.shape[0]
        return CommitSizes(
            rows=memory.num_rows,
            moving=staged + int(filled.max()),
            below=0 if params.absorb_gate is None else int((staged + filled - kept - alive).max()),
            old_blocks=int(starts.diff().max()),
            dissolved_blocks=int(zeros.index_add(0, row[gone], torch.ones_like(row)[gone]).max()),
            shared_bytes=self.shared_bytes,
        )


def _multiple(value: int, of: int) -> int:
    return -(-value // of) * of


def _tensors(
    memory: KvMemory, params: PublishParams, decision: Decision, device: torch.device
) -> dict[str, torch.Tensor]:
    """Everything the kernel reads besides the arenas, on the device in the kernel's types."""

    def int32(x: torch.Tensor) -> torch.Tensor:
        return x.to(device, torch.int32).contiguous()

    def uint8(x: torch.Tensor) -> torch.Tensor:
        return x.to(device, torch.uint8).contiguous()

    def table(name: str, rows: RowTable) -> dict[str, torch.Tensor]:
        assert all(a <= b for a, b in pairwise(rows.starts))
        starts = torch.tensor(rows.starts, dtype=torch.int32)
        return {f"{name}_starts": int32(starts), f"{name}_ids": int32(rows.ids), f"{name}_lens": int32(rows.lens)}

    addresses = torch.tensor(memory.addresses, dtype=torch.int64).T.contiguous().to(device)
    return {
        "layer_pages": addresses[0], "layer_seen": addresses[1], "staged": int32(params.staged),
        **table("old", params.old), **table("new", params.new),
        "dissolve": uint8(params.dissolve), "is_new": uint8(params.is_new), "alive": uint8(decision.alive),
        "marks": uint8(decision.marks),
        "staged_score": decision.staged_score.to(device, torch.float32).contiguous(),
        "move_from": int32(params.move_from), "move_to": int32(params.move_to),
    }  # fmt: skip


def _fill(memory: KvMemory, params: PublishParams, tensors: Mapping[str, torch.Tensor]) -> CudaCommitParams:
    """Params with pointers and sizes; the tensors must live until the launch is over."""
    num_pages, kv_heads, _, page_tokens, _ = memory.pages[0].shape
    return CudaCommitParams(
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        blocks=memory.blocks.data_ptr(), score=memory.score.data_ptr(),
        num_staged=params.staged.shape[0], num_moves=params.move_from.shape[0], num_rows=memory.num_rows,
        kv_heads=kv_heads, num_slots=num_pages * page_tokens, num_blocks=memory.blocks.shape[0],
        absorb=int(params.absorb_gate is not None), gate=params.absorb_gate or 0.0,
    )  # fmt: skip
