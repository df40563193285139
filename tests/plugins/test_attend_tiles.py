"""Tile lists against what they promise: every unit of every group once, in order, and equal work for every block."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.attend.params import RECORD_SQUARES, LayerBlocks, StepTables
from plugins.attend.tiles import RowTable, TileList, TilePlan, build_tiles, recorded_rows, split_rows
from plugins.kv_tiles import TILE_FIELDS, KvShape
from plugins.layout import BlockLayout, PageLayout

KV_HEADS = 2


@dataclass(frozen=True)
class Case:
    """Per sequence: query rows, and (id, filled tokens) of its pages. blocks[layer][sequence * KV_HEADS + head]."""

    rows: tuple[int, ...]
    pages: tuple[tuple[tuple[int, int], ...], ...]
    blocks: tuple[tuple[int, ...], ...]
    record: tuple[int, ...]  # marks
    group: int = 3
    page_tokens: int = 8

    @property
    def shape(self) -> KvShape:
        return KvShape(
            PageLayout(1, KV_HEADS, 64, self.page_tokens, 2), BlockLayout("int4", 16, 64), "fp16", self.group
        )

    def tables(self) -> StepTables:
        flat = [page for pages in self.pages for page in pages]
        starts = torch.stack([_starts(counts) for counts in self.blocks])
        num_blocks = int(starts[:, -1].sum())
        first = tuple(_starts([int(n) for n in starts[:, -1]]).tolist()[:-1])
        blocks = LayerBlocks(starts, torch.arange(num_blocks).int(), torch.full((num_blocks,), 16).int(), first)
        return StepTables(
            _starts(self.rows), _starts([len(p) for p in self.pages]),
            torch.tensor([p[0] for p in flat]).int(), torch.tensor([p[1] for p in flat]).int(),
            torch.tensor(self.record).to(torch.uint8), torch.zeros(len(self.rows)).int(), blocks,
        )  # fmt: skip

    def lens(self, sequence: int) -> list[int]:
        """Filled tokens of each page, 0 where its id is -1."""
        return [length if page >= 0 else 0 for page, length in self.pages[sequence]]

    def squares(self, sequence: int) -> bool:
        first = sum(self.rows[:sequence])
        return RECORD_SQUARES in self.record[first : first + self.rows[sequence]]

    def page_units(self, sequence: int, last: int) -> int:
        """Units of pages that row `last` of the sequence sees."""
        lens = self.lens(sequence)
        visible = sum(lens) - (self.rows[sequence] - 1 - last)
        return -(-sum(sum(lens[:i]) < visible for i in range(len(lens))) // self.shape.unit_pages)


def _starts(counts: tuple[int, ...] | list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


Tile = dict[str, int]


def tiles_of(tiles: TileList, layer: int) -> list[Tile]:
    count = int(tiles.block_tiles[layer, -1])
    return [dict(zip(TILE_FIELDS, row, strict=True)) for row in tiles.tiles[layer, :count].tolist()]


def expected_groups(
    case: Case, layer: int, count: list[int], per_tile: int
) -> dict[tuple[int, int, int], tuple[int, int]]:
    """(sequence, head, first row) -> units of pages, units of blocks; first rows counted in q."""
    groups = {}
    for sequence, rows in enumerate(count):
        for row in range(0, rows, per_tile):
            page_units = case.page_units(sequence, min(rows, row + per_tile) - 1)
            for head in range(KV_HEADS):
                key = (sequence, head, sum(case.rows[:sequence]) + row)
                groups[key] = (page_units, case.blocks[layer][sequence * KV_HEADS + head])
    return groups


def check(case: Case, rows: RowTable, plan: TilePlan) -> None:
    tiles = build_tiles(case.tables(), rows, plan)
    count = rows.count.tolist()
    for layer in range(len(case.blocks)):
        found: dict[tuple[int, int, int], list[tuple[int, Tile]]] = {}
        for index, tile in enumerate(tiles_of(tiles, layer)):
            found.setdefault((tile["sequence"], tile["head"], tile["first_row"]), []).append((index, tile))
        groups = expected_groups(case, layer, count, plan.rows_per_tile)
        assert found.keys() == groups.keys()
        for key, pieces in found.items():
            check_group(case, groups[key], pieces)
        check_ranges(case, tiles, layer, plan.rows_per_tile)
        check_logits(case, tiles_of(tiles, layer), tiles.num_logits, rows.keep_logits)


def check_group(case: Case, units: tuple[int, int], pieces: list[tuple[int, Tile]]) -> None:
    at = 0
    for n, (index, tile) in enumerate(pieces):
        first = ~tile["first_split"] if case.squares(tile["sequence"]) else tile["first_split"]
        assert (first, tile["num_splits"], index) == (pieces[0][0], len(pieces), pieces[0][0] + n)
        assert (tile["first_unit"], tile["page_units"]) == (at, units[0])
        lens = case.lens(tile["sequence"])
        assert tile["page_tokens"] == sum(lens)
        assert tile["position"] == sum(lens[: min(at, units[0]) * case.shape.unit_pages])
        assert tile["num_units"] > 0 or sum(units) == 0
        at += tile["num_units"]
    assert at == sum(units)


def check_ranges(case: Case, tiles: TileList, layer: int, per_pass: int) -> None:
    """No block has more than its share and what one unit adds at either end, in all passes over it."""
    page, block = case.shape.unit_pages * case.shape.page_bytes, case.shape.block.block_bytes
    bounds, listed = tiles.block_tiles[layer].tolist(), tiles_of(tiles, layer)
    assert bounds[0] == 0 and bounds == sorted(bounds)

    def cost(tile: Tile) -> int:
        pages = min(max(tile["page_units"] - tile["first_unit"], 0), tile["num_units"])
        return (pages * page + (tile["num_units"] - pages) * block) * -(-tile["num_rows"] // per_pass)

    total = sum(map(cost, listed))
    unit = max(page, block) * max((-(-tile["num_rows"] // per_pass) for tile in listed), default=1)
    for begin, end in pairwise(bounds):
        assert sum(map(cost, listed[begin:end])) <= total / (len(bounds) - 1) + unit + len(listed)


def check_logits(case: Case, listed: list[Tile], num_logits: int, keeps: bool) -> None:
    used: set[int] = set()
    for tile in listed:
        rows = range(tile["first_row"], tile["first_row"] + tile["num_rows"])
        records = keeps and any(case.record[row] for row in rows)
        assert (tile["logits"] >= 0) == records
        if records:
            size = tile["num_units"] * tile["num_rows"] * case.group * case.shape.unit_keys // 16
            mine = set(range(tile["logits"], tile["logits"] + size))
            assert not mine & used and max(mine, default=0) <= max(num_logits - 1, 0)
            used |= mine


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num = draw(st.integers(1, 4))
    rows = tuple(draw(st.sampled_from((0, 1, 1, 2, 5, 6, 40))) for _ in range(num))
    page = st.tuples(st.sampled_from((-1, 0, 1, 2)), st.integers(0, 8))
    pages = [draw(st.lists(page, max_size=30)) for _ in range(num)]
    for own, count in zip(pages, rows, strict=True):  # rows are page tokens themselves
        own += [(3, 8)] * -(-count // 8)
    layers = draw(st.integers(1, 3))
    counts = st.lists(st.integers(0, 40), min_size=num * KV_HEADS, max_size=num * KV_HEADS)
    blocks = tuple(tuple(draw(counts)) for _ in range(layers))
    marks = [mark for n in rows for mark in (draw(st.sampled_from((1, RECORD_SQUARES))),) * n]
    record = tuple(mark * draw(st.integers(0, 1)) for mark in marks)
    return Case(rows, tuple(map(tuple, pages)), blocks, record, draw(st.sampled_from((1, 3, 8, 16))))


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 9))
def test_every_unit_lies_in_one_tile_and_blocks_share_the_work(case: Case, ranges: int) -> None:
    small, large, _ = split_rows(case.tables(), case.group)
    for rows, query_rows in ((small, 16), (large, 64)):
        check(case, rows, TilePlan(case.shape, KV_HEADS, query_rows, ranges, min_range_bytes=1))


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 9))
def test_rows_whose_squares_add_up_share_their_tiles(case: Case, ranges: int) -> None:
    """In the list of `score`: a key of such a sequence is in one tile, with all recorded rows; others are in tiles."""
    tables, plan = case.tables(), TilePlan(case.shape, KV_HEADS, 64, ranges, min_range_bytes=1)
    rows = recorded_rows(tables)
    assert rows.rows is not None
    tiles = build_tiles(tables, rows, plan)
    for layer in range(len(case.blocks)):
        found: dict[tuple[int, int, int], list[tuple[int, Tile]]] = {}
        for index, tile in enumerate(tiles_of(tiles, layer)):
            found.setdefault((tile["sequence"], tile["head"], tile["first_row"]), []).append((index, tile))
        expected = {}
        for sequence, count in enumerate(rows.count.tolist()):
            step = max(count, 1) if case.squares(sequence) else plan.rows_per_tile
            for row in range(0, count, step):
                first = int(rows.first[sequence]) + row
                size = min(step, count - row)
                last = int(rows.rows[first + size - 1]) - sum(case.rows[:sequence])
                for head in range(KV_HEADS):
                    units = case.page_units(sequence, last), case.blocks[layer][sequence * KV_HEADS + head]
                    expected[sequence, head, first] = (units, size)
        assert found.keys() == expected.keys()
        for key, pieces in found.items():
            check_group(case, expected[key][0], pieces)
            assert {tile["num_rows"] for _, tile in pieces} == {expected[key][1]}
        check_ranges(case, tiles, layer, plan.rows_per_tile)


def test_rows_go_to_small_tiles_where_they_fit() -> None:
    case = Case((1, 5, 6, 0), (((0, 8),), ((1, 8),), ((2, 8),), ()), ((0,) * 8,), tuple(i % 2 for i in range(12)))
    small, large, scored = split_rows(case.tables(), case.group)
    assert small.count.tolist() == [1, 5, 0, 0] and large.count.tolist() == [0, 0, 6, 0]
    assert scored.rows is not None and scored.rows.tolist() == [7, 9, 11]
    assert scored.count.tolist() == [0, 0, 3, 0] and scored.first.tolist()[2] == 0


def test_little_work_starts_few_blocks() -> None:
    case = Case((1,), (tuple((i, 8) for i in range(40)),), ((0, 0),), (1,))
    small, _, _ = split_rows(case.tables(), case.group)
    tiles = build_tiles(case.tables(), small, TilePlan(case.shape, KV_HEADS, 16, 100, min_range_bytes=1 << 15))
    # 2 heads of 40 pages of 2 KB: five ranges of 32 KB, one of which has a piece of both heads
    assert int((tiles.block_tiles[0].diff() > 0).sum()) == 5 and int(tiles.block_tiles[0, -1]) == 6


@pytest.mark.parametrize("rows", [(0,), (0, 0)])
def test_no_rows_no_tiles(rows: tuple[int, ...]) -> None:
    case = Case(rows, ((),) * len(rows), ((0, 0) * len(rows),), ())
    small, large, _ = split_rows(case.tables(), case.group)
    for table in (small, large):
        assert build_tiles(case.tables(), table, TilePlan(case.shape, KV_HEADS, 16, 4)).tiles.shape[1] == 0
