"""What `attend` and `score` are compiled with, and how they lie in shared memory: the host side of kv_tiles.cuh.

A unit is what one stage of the ring holds: `unit_pages` pages of one KV head, or one committed block. Small pages share
a unit, so that a stage is worth a warp's time and holds whole steps of 16 keys.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

from plugins.errors import UnsupportedShapeError
from plugins.layout import BlockLayout, Element, PageLayout, geometry_defines

NUM_CONSUMERS = 4
THREADS = 32 * (NUM_CONSUMERS + 1)
MAX_STAGES = 16
STEP_KEYS = 16
UNIT_BYTES = 8192  # that pages of a unit reach if they can
MAX_UNIT_PAGES = 8
HEADER_BYTES = 16
STAGE_ALIGNMENT = 128
ROW_SUM_BYTES = 8
# KiB of shared memory of a multiprocessor, and what one block may take (CUDA C++ Programming Guide).
# Each resident block costs RESERVED_BYTES more than it asks for.
SHARED_BYTES = {"sm_80": (164, 163), "sm_89": (100, 99), "sm_90a": (228, 227), "sm_120": (100, 99)}
RESERVED_BYTES = 1024
TILE_FIELDS = (
    "sequence", "head", "first_row", "num_rows", "first_unit", "num_units", "page_units", "position", "page_tokens",
    "first_split", "num_splits", "logits",
)  # fmt: skip


class KvArgs(ctypes.Structure):
    """KvArgs of kv_tiles.cuh: addresses of one layer's pages, of the blocks, of the tables in AttendTables."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("pages", "blocks", "row_starts", "page_starts", "page_ids", "page_lens")
        ),
        *((name, ctypes.c_void_p) for name in ("block_starts", "block_ids", "block_lens")),
        *((name, ctypes.c_int32) for name in ("num_pages", "num_blocks", "kv_heads", "group")),
    )


@dataclass(frozen=True)
class KvShape:
    """Geometry that kernels are compiled for. Raises UnsupportedShapeError where there is none.

    kv_heads of `page` does not matter. group: query heads per KV head.
    """

    page: PageLayout
    block: BlockLayout
    element: Element
    group: int

    def __post_init__(self) -> None:
        if not 1 <= self.group <= STEP_KEYS:
            raise UnsupportedShapeError(
                f"query heads per KV head: got {self.group}, expected 1 to {STEP_KEYS}; run this model without kernels"
            )
        try:
            geometry_defines(self.page, self.block, self.element)
        except ValueError as error:
            raise UnsupportedShapeError(str(error)) from error

    @property
    def page_bytes(self) -> int:
        """K and V of one (page, head)."""
        return 2 * self.page.page_tokens * self.page.head_dim * self.page.element_bytes

    @cached_property
    def unit_pages(self) -> int:
        pages = 1
        while pages < MAX_UNIT_PAGES and (
            pages * self.page_bytes < UNIT_BYTES or pages * self.page.page_tokens % STEP_KEYS
        ):
            pages *= 2
        return pages

    @cached_property
    def unit_keys(self) -> int:
        """Tokens or entries that a unit has room for, a multiple of 16."""
        keys = max(self.unit_pages * self.page.page_tokens, self.block.block_entries)
        return -(-keys // STEP_KEYS) * STEP_KEYS

    @cached_property
    def stage_bytes(self) -> int:
        return _aligned(max(self.unit_pages * self.page_bytes, self.block.block_bytes))


@dataclass(frozen=True)
class SharedPlan:
    """Where things lie in the shared memory of a block, bytes; stages come last, as many as there is room for."""

    offsets: tuple[tuple[str, int], ...]
    stages_at: int

    @classmethod
    def of(cls, shape: KvShape, query_rows: int, extra: tuple[tuple[str, int], ...]) -> SharedPlan:
        """extra: name and size of what one operation keeps besides barriers, headers, queries and factors."""
        query_bytes = query_rows * shape.page.head_dim * 2
        own_codes = shape.block.quantized and shape.element != "fp16"
        parts = (
            ("BARRIERS_AT", 2 * 8 * MAX_STAGES),
            ("HEADERS_AT", HEADER_BYTES * shape.unit_pages * MAX_STAGES),
            ("QUERY_AT", query_bytes),
            ("QUERY_CODES_AT", query_bytes if own_codes else 0),
            ("FACTORS_AT", 4 * query_rows),
            *extra,
        )
        offsets, at = [], 0
        for name, size in parts:
            offsets.append((name, at))
            at = _aligned(at + size)
        places = dict(offsets)
        if not own_codes:
            places["QUERY_CODES_AT"] = places["QUERY_AT"]
        return cls(tuple(places.items()), at)


@dataclass(frozen=True)
class Residency:
    """How a persistent kernel sits on a multiprocessor."""

    blocks: int
    num_stages: int
    shared_bytes: int


def residency(shape: KvShape, plan: SharedPlan, sm: str) -> Residency:
    """As many blocks as planned if each gets a stage per consumer warp, else fewer with more stages.

    Raises UnsupportedShapeError where not one stage fits.
    """
    per_processor, per_block = (1024 * kib for kib in SHARED_BYTES[sm])
    for blocks in range(_blocks_by_registers(shape, sm), 0, -1):
        room = min(per_block, per_processor // blocks - RESERVED_BYTES) - plan.stages_at
        num_stages = min(MAX_STAGES, room // shape.stage_bytes)
        if num_stages >= NUM_CONSUMERS or (blocks == 1 and num_stages >= 1):
            return Residency(blocks, num_stages, plan.stages_at + num_stages * shape.stage_bytes)
    raise UnsupportedShapeError(
        f"shared memory on {sm}: a page of {shape.page_bytes} or a block of {shape.block.block_bytes} bytes a head "
        f"needs {plan.stages_at + shape.stage_bytes} bytes, expected at most {per_block}; use shorter pages or blocks"
    )


def _blocks_by_registers(shape: KvShape, sm: str) -> int:
    """Blocks of 5 warps that there are registers for: 168 a thread, or 128; on sm_80 those are a few too few."""
    blocks = 2 if shape.page.head_dim == 128 else 3
    return blocks - 1 if sm == "sm_80" else blocks


def kernel_defines(shape: KvShape, query_rows: int, plan: SharedPlan, sm: str) -> tuple[tuple[str, int], ...]:
    """Everything that the sources are compiled with. `sm` decides how many registers a thread may have."""
    return (
        *geometry_defines(shape.page, shape.block, shape.element),
        ("QUERY_ROWS", query_rows),
        ("UNIT_PAGES", shape.unit_pages),
        ("UNIT_KEYS", shape.unit_keys),
        ("STAGE_BYTES", shape.stage_bytes),
        ("MIN_BLOCKS", residency(shape, plan, sm).blocks),
        ("MAX_STAGES", MAX_STAGES),
        ("NUM_CONSUMERS", NUM_CONSUMERS),
        *plan.offsets,
        ("STAGES_AT", plan.stages_at),
        ("TILE_INTS", len(TILE_FIELDS)),
        *((f"TILE_{name.upper()}", index) for index, name in enumerate(TILE_FIELDS)),
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // STAGE_ALIGNMENT) * STAGE_ALIGNMENT
