"""What launches of `attend` and `score` share: tables and tile lists of a step on the device, records over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from plugins.attend.params import AttendTables, LayerBlocks, StepTables
from plugins.attend.tiles import RowTable, TileList, TilePlan, build_tiles
from plugins.errors import LaunchError, UnsupportedShapeError
from plugins.kv_tiles import KvArgs, KvShape
from plugins.layout import ELEMENT_BYTES, BlockLayout, Element, PageLayout
from plugins.memory import KvMemory
from plugins.staging import TableStaging

ELEMENTS: dict[torch.dtype, Element] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
INT32_BYTES = 4


class LayerParams(Protocol):
    """AttendParams or ScoreParams."""

    @property
    def pages(self) -> torch.Tensor: ...
    @property
    def seen(self) -> torch.Tensor: ...
    @property
    def blocks(self) -> torch.Tensor: ...
    @property
    def score(self) -> torch.Tensor: ...
    @property
    def block_layout(self) -> BlockLayout: ...
    @property
    def tables(self) -> AttendTables: ...


@dataclass(frozen=True, eq=False)
class StagedTiles:
    """A tile list on the device.   tiles, block_tiles: as in TileList.   rows [*] int32: of its RowTable, or None."""

    tiles: torch.Tensor
    block_tiles: torch.Tensor
    num_logits: int
    rows: torch.Tensor | None

    @classmethod
    def put(cls, tables: StepTables, rows: RowTable, plan: TilePlan, staging: TableStaging) -> StagedTiles:
        """Builds a list over host tables; its place on the device holds it once `staging` is flushed."""
        return cls.of(build_tiles(tables, rows, plan), rows, staging)

    @classmethod
    def of(cls, tiles: TileList, rows: RowTable, staging: TableStaging) -> StagedTiles:
        """The list of `rows`, on the device once `staging` is flushed."""
        listed = None if rows.rows is None else staging.put(rows.rows.int())
        return cls(staging.put(tiles.tiles), staging.put(tiles.block_tiles), tiles.num_logits, listed)

    @property
    def max_tiles(self) -> int:
        """Most tiles that a layer has; 0: nothing is to be launched."""
        return self.tiles.shape[1]

    def addresses(self, layer: int) -> tuple[int, int]:
        """Of the layer's tiles and block_tiles."""
        return _row_address(self.tiles, layer), _row_address(self.block_tiles, layer)


class ResidentBlocks:
    """Block lists on a device. They change at commits only, so those of recent steps stay there."""

    def __init__(self, device: torch.device, most: int = 8) -> None:
        """most: lists that are kept, each as the host object it was made from."""
        self._device, self._most = device, most
        self._held: list[tuple[LayerBlocks, LayerBlocks]] = []

    def of(self, blocks: LayerBlocks) -> LayerBlocks:
        """`blocks` on the device: a copy of its own when it first comes, then the same one."""
        for index, (host, resident) in enumerate(self._held):
            if host is blocks:
                self._held.append(self._held.pop(index))
                return resident
        starts, ids, lens = (x.to(self._device) for x in (blocks.starts, blocks.ids, blocks.lens))
        resident = LayerBlocks(starts, ids, lens, blocks.first)
        self._held = [*self._held[-self._most + 1 :], (blocks, resident)]
        return resident


def put_tables(tables: StepTables, staging: TableStaging, resident: LayerBlocks | None = None) -> StepTables:
    """The same tables on the device, once `staging` is flushed. resident: its block lists, if already there."""
    put, blocks = staging.put, tables.blocks
    if resident is None:
        resident = LayerBlocks(put(blocks.starts), put(blocks.ids), put(blocks.lens), blocks.first)
    return StepTables(
        put(tables.row_starts), put(tables.page_starts), put(tables.page_ids), put(tables.page_lens),
        put(tables.record), put(tables.record_skip), resident,
    )  # fmt: skip


def single_layer(params: LayerParams) -> tuple[KvMemory, StepTables]:
    """The memory and tables of one layer as those of a step of one layer."""
    tables = params.tables
    memory = KvMemory((params.pages,), (params.seen,), params.blocks, params.score, params.block_layout)
    blocks = LayerBlocks(tables.block_starts[None], tables.block_ids, tables.block_lens, (0,))
    return memory, StepTables(
        tables.row_starts,
        tables.page_starts,
        tables.page_ids,
        tables.page_lens,
        tables.record,
        tables.record_skip,
        blocks,
    )


def kv_shape(memory: KvMemory, group: int) -> KvShape:
    """Raises UnsupportedShapeError for a page type or sizes that kernels do not have."""
    _, kv_heads, _, page_tokens, head_dim = memory.pages[0].shape
    element = ELEMENTS.get(memory.pages[0].dtype)
    if element is None:
        raise UnsupportedShapeError(
            f"pages: got {memory.pages[0].dtype}, expected float16 or bfloat16 on a GPU; pass --kv-dtype"
        )
    page = PageLayout(len(memory.pages), kv_heads, head_dim, page_tokens, ELEMENT_BYTES)
    return KvShape(page, memory.layout, element, group)


def kv_args(memory: KvMemory, tables: StepTables, group: int) -> KvArgs:
    """The fields that layers share. tables: on the device."""
    return KvArgs(
        blocks=memory.blocks.data_ptr(),
        row_starts=tables.row_starts.data_ptr(),
        page_starts=tables.page_starts.data_ptr(),
        page_ids=tables.page_ids.data_ptr(),
        page_lens=tables.page_lens.data_ptr(),
        num_pages=memory.pages[0].shape[0],
        num_blocks=memory.blocks.shape[0],
        kv_heads=memory.pages[0].shape[1],
        group=group,
    )


def set_layer(args: KvArgs, memory: KvMemory, tables: StepTables, layer: int) -> None:
    """Those that differ."""
    first = INT32_BYTES * tables.blocks.first[layer]
    args.pages = memory.addresses[layer][0]
    args.block_starts = _row_address(tables.blocks.starts, layer)
    args.block_ids = tables.blocks.ids.data_ptr() + first
    args.block_lens = tables.blocks.lens.data_ptr() + first


def check_addresses(named: dict[str, int | None]) -> None:
    """Raises LaunchError for an address that 16-byte accesses cannot start at, before anything is launched."""
    for name, address in named.items():
        if (address or 0) % 16:
            raise LaunchError(f"{name}: got address {address:#x}, expected a multiple of 16; nothing was launched")


def check_queries(x: torch.Tensor, name: str, memory: KvMemory, shape: tuple[int, int]) -> None:
    """x: rows of query heads. shape: (rows, query heads). Raises LaunchError unless a kernel can take it as it is."""
    pages = memory.pages[0]
    expected = (*shape, pages.shape[4])
    if x.dtype != pages.dtype or x.device != pages.device or tuple(x.shape) != expected or not x.is_contiguous():
        raise LaunchError(
            f"{name}: got {x.dtype} {tuple(x.shape)} on {x.device}{'' if x.is_contiguous() else ', not contiguous'}, "
            f"expected {pages.dtype} {expected} on {pages.device}; nothing was launched"
        )


def _row_address(table: torch.Tensor, row: int) -> int:
    return table.data_ptr() + row * table.stride(0) * table.element_size()
