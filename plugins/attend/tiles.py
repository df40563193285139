"""Which block of a launch reads which KV: the tile lists of `attend` and `score`, for all layers of a step at once.

The KV of a group (sequence, KV head, some query rows) is a list of units (plugins/kv_tiles.py): pages first, then
committed blocks. Laid end to end, the groups of a layer are one line of bytes. The line is cut into equal ranges, one
per block of the launch, at the nearest units; a tile is a piece of one group within one range. So every block reads the
same number of bytes however unequal heads and conversations are, and a layer has at most groups + ranges tiles. All of
it is int64 arithmetic on host tensors, a few dozen operations whatever the batch.

Rows that `score` adds up (RECORD_SQUARES) are one group however many they are: it passes over their tile several times,
query_rows at a time. So every key is in one tile of a launch, and what is added to it comes in an order that neither
the ranges nor chance decide. In `attend` those of a sequence that fits a small tile are one group anyway.

A tile is TILE_FIELDS of plugins.kv_tiles, int32:
    sequence, head, first_row, num_rows   first_row: in q (attend) or in the list of scored rows (score)
    first_unit, num_units, page_units     units of the group below page_units are pages, the others blocks
    position, page_tokens                 page tokens of the sequence before the first unit, and in all
    first_split, num_splits               the group's tiles; ~first_split where squares of weights are added up
    logits                                where attend keeps logits for recording, in 16 floats; -1: it does not
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from plugins.attend.params import RECORD_SQUARES, LayerBlocks, StepTables
from plugins.kv_tiles import STEP_KEYS, TILE_FIELDS, KvShape

MIN_RANGE_BYTES = 32768  # a block is not started for less: a piece costs its share of the merge


@dataclass(frozen=True)
class TilePlan:
    """query_rows: of a tile, or of a pass over it; query heads counted. num_ranges: blocks of the launch."""

    shape: KvShape
    kv_heads: int
    query_rows: int
    num_ranges: int
    min_range_bytes: int = MIN_RANGE_BYTES

    @property
    def rows_per_tile(self) -> int:
        return self.query_rows // self.shape.group


@dataclass(frozen=True, eq=False)
class TileList:
    """tiles [num_layers, most tiles of a layer, fields] int32, rest zeros; block_tiles [num_layers, ranges + 1].

    Block b works on tiles [block_tiles[b], block_tiles[b + 1]). num_logits: most logits of a layer, in 16 floats.
    """

    tiles: torch.Tensor
    block_tiles: torch.Tensor
    num_logits: int


@dataclass(frozen=True, eq=False)
class RowTable:
    """Query rows that tiles are made of.   first, count [S]: rows of each sequence, positions in `rows` or in q.

    rows [*]: their indices in q, None where they are q's own rows.   keep_logits: of groups with a recording row.
    """

    first: torch.Tensor
    count: torch.Tensor
    rows: torch.Tensor | None = None
    keep_logits: bool = False


@dataclass(frozen=True, eq=False)
class _Groups:
    """One entry per group, the same in every layer; page_units: those that its last row sees; squares: of its rows."""

    sequence: torch.Tensor
    head: torch.Tensor
    first_row: torch.Tensor
    num_rows: torch.Tensor
    page_units: torch.Tensor
    records: torch.Tensor
    squares: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Held:
    """A list and what it was built from.   first_page, begin, end [num_layers, most tiles]: of each tile, in pages."""

    tiles: TileList
    groups: _Groups
    blocks: LayerBlocks
    page_starts: torch.Tensor
    first_page: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor

    @classmethod
    def of(cls, tables: StepTables, groups: _Groups, plan: TilePlan, tiles: TileList) -> _Held:
        field = {name: tiles.tiles[..., index].long() for index, name in enumerate(TILE_FIELDS)}
        starts = tables.page_starts.long()
        begin, end = starts[field["sequence"]], starts[field["sequence"] + 1]
        end = torch.where(field["num_rows"] > 0, end, begin)  # places that no tile takes stay zeros
        pages = torch.minimum(field["first_unit"], field["page_units"]) * plan.shape.unit_pages
        return cls(tiles, groups, tables.blocks, tables.page_starts, torch.minimum(begin + pages, end), begin, end)

    def fits(self, tables: StepTables, groups: _Groups) -> bool:
        """Whether the list for these differs in lengths only."""
        return (
            tables.blocks is self.blocks
            and torch.equal(tables.page_starts, self.page_starts)
            and all(torch.equal(getattr(groups, f.name), getattr(self.groups, f.name)) for f in fields(_Groups))
        )

    def set_lengths(self, positions: torch.Tensor) -> None:
        before, tiles = positions[self.begin], self.tiles.tiles
        tiles[..., TILE_FIELDS.index("position")] = (positions[self.first_page] - before).int()
        tiles[..., TILE_FIELDS.index("page_tokens")] = (positions[self.end] - before).int()


def split_rows(tables: StepTables, group: int) -> tuple[RowTable, RowTable, RowTable]:
    """Rows for tiles of 16 query rows (sequences that fit one), for tiles of 64, and those of the latter to score."""
    starts = tables.row_starts.long()
    first, count = starts[:-1], starts.diff()
    small = count * group <= STEP_KEYS
    return (
        RowTable(first, torch.where(small, count, 0), keep_logits=True),
        RowTable(first, torch.where(small, 0, count)),
        recorded_rows(tables, ~small),
    )


def recorded_rows(tables: StepTables, of: torch.Tensor | None = None) -> RowTable:
    """Rows with `record` set, of all sequences or those marked in `of` [S] bool."""
    starts = tables.row_starts.long()
    recorded = tables.record.bool()
    if of is not None:
        recorded = recorded & torch.repeat_interleave(of, starts.diff())
    before = _counted(recorded)[starts]
    return RowTable(before[:-1], before.diff(), recorded.nonzero()[:, 0])


def build_tiles(tables: StepTables, rows: RowTable, plan: TilePlan) -> TileList:
    """Tiles of all layers. `tables` are host tensors; pages and blocks of id -1 hold nothing.

    A group with nothing to read still has a tile, of no units, so that its rows are written.
    """
    positions = _positions(tables)
    return _build(tables, _groups(tables, rows, plan, positions), plan, positions)


class TileLists:
    """Builds the lists of one step after another, and keeps the last one of every plan.

    From a decode step to the next nothing changes, as a rule, but how many tokens lie in the last pages: then the list
    is the same but for two fields, whose places are known.
    """

    def __init__(self) -> None:
        self._held: dict[TilePlan, _Held] = {}

    def build(self, tables: StepTables, rows: RowTable, plan: TilePlan) -> TileList:
        """As `build_tiles`. The list is edited by the next call for this plan: copy it before."""
        if not bool(rows.count.any()):
            return _empty(tables, plan)
        positions = _positions(tables)
        groups = _groups(tables, rows, plan, positions)
        held = self._held.get(plan)
        if held is None or not held.fits(tables, groups):
            held = _Held.of(tables, groups, plan, _build(tables, groups, plan, positions))
            self._held[plan] = held
        else:
            held.set_lengths(positions)
        return held.tiles


def _build(tables: StepTables, groups: _Groups, plan: TilePlan, positions: torch.Tensor) -> TileList:
    if groups.sequence.shape[0] == 0:
        return _empty(tables, plan)
    block_units = tables.blocks.starts.long().diff(dim=1)[:, groups.sequence * plan.kv_heads + groups.head]
    cuts = _cut(groups, block_units, plan)
    return _list(tables, groups, plan, positions, cuts)


def _empty(tables: StepTables, plan: TilePlan) -> TileList:
    num_layers = tables.blocks.starts.shape[0]
    no_tiles = torch.zeros((num_layers, 0, len(TILE_FIELDS)), dtype=torch.int32)
    return TileList(no_tiles, torch.zeros((num_layers, plan.num_ranges + 1), dtype=torch.int32), 0)


def _positions(tables: StepTables) -> torch.Tensor:
    """[num listed pages + 1]: page tokens, of all sequences, before each listed page."""
    lens = torch.where(tables.page_ids >= 0, tables.page_lens, 0).long()
    return torch.cat([lens.new_zeros(1), lens.cumsum(0)])


def _groups(tables: StepTables, rows: RowTable, plan: TilePlan, positions: torch.Tensor) -> _Groups:
    squares = _squaring(tables)
    most = torch.full_like(rows.count, plan.rows_per_tile)
    if rows.rows is not None:
        most = torch.where(squares, rows.count.clamp(min=1), most)
    tiles_of = -(-rows.count // most)
    sequence = torch.repeat_interleave(tiles_of)
    part = torch.arange(sequence.shape[0]) - (tiles_of.cumsum(0) - tiles_of)[sequence]
    before, step = part * most[sequence], most[sequence]
    first, num_rows = rows.first[sequence] + before, torch.minimum(rows.count[sequence] - before, step)
    page_units = _visible_units(tables, plan, positions, (sequence, first + num_rows - 1, rows.rows))
    marks = _counted(tables.record != 0)
    records = marks[first + num_rows] > marks[first] if rows.keep_logits else torch.zeros_like(first, dtype=torch.bool)
    per_row = (sequence, first, num_rows, page_units, records, squares[sequence])
    sequence, *rest = (torch.repeat_interleave(x, plan.kv_heads) for x in per_row)
    return _Groups(sequence, torch.arange(plan.kv_heads).repeat(part.shape[0]), *rest)


def _squaring(tables: StepTables) -> torch.Tensor:
    """Which sequences add squares up [S] bool."""
    added = tables.record == RECORD_SQUARES
    if not bool(added.any()):
        return torch.zeros(tables.row_starts.shape[0] - 1, dtype=torch.bool)
    return _counted(added)[tables.row_starts.long()].diff() > 0


def _counted(flags: torch.Tensor) -> torch.Tensor:
    """[n + 1]: how many of the first i flags are set."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), flags.long().cumsum(0)])


def _visible_units(
    tables: StepTables,
    plan: TilePlan,
    positions: torch.Tensor,
    last: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
) -> torch.Tensor:
    """Units of pages that begin with a token which the last row sees. last: (sequence, last row, its list)."""
    sequence, last_row, listed = last
    if listed is not None:
        last_row = listed[last_row]
    page_starts = tables.page_starts.long()
    begin, end = page_starts[sequence], page_starts[sequence + 1]
    hidden = tables.row_starts.long()[sequence + 1] - 1 - last_row
    visible_end = torch.maximum(positions[end] - hidden, positions[begin])
    num_pages = torch.searchsorted(positions[:-1].contiguous(), visible_end) - begin
    num_pages = torch.minimum(num_pages, end - begin).clamp(min=0)
    return -(-num_pages // plan.shape.unit_pages)


@dataclass(frozen=True, eq=False)
class _Cuts:
    """Over a layer's line of units.   group_start [L, N + 1]; range_start [L, ranges + 1]; num_units [L, N] real."""

    group_start: torch.Tensor
    range_start: torch.Tensor
    num_units: torch.Tensor


def _cut(groups: _Groups, block_units: torch.Tensor, plan: TilePlan) -> _Cuts:
    page_units, passes = groups.page_units, -(-groups.num_rows // plan.rows_per_tile)
    page_cost = plan.shape.unit_pages * plan.shape.page_bytes
    block_cost = plan.shape.block.block_bytes
    num_units = page_units + block_units
    group_start = _starts(num_units.clamp(min=1))  # an empty group takes a place, so that it gets a tile
    cost_start = _starts(((page_units * page_cost + block_units * block_cost) * passes).clamp(min=1))
    total = cost_start[:, -1:]
    num_ranges = (total // plan.min_range_bytes).clamp(1, plan.num_ranges)
    bound = torch.minimum(torch.arange(plan.num_ranges + 1) * total // num_ranges, total)
    group = (torch.searchsorted(cost_start, bound, right=True) - 1).clamp(max=num_units.shape[1] - 1)
    inside = (bound - cost_start.gather(1, group)) // passes[group]
    pages = page_units.expand_as(num_units).gather(1, group)
    in_pages = (inside + page_cost // 2) // page_cost
    in_blocks = pages + (inside - pages * page_cost + block_cost // 2) // block_cost
    unit = torch.where(inside < pages * page_cost, in_pages, in_blocks)
    unit = torch.where(bound == total, group_start.diff(dim=1).gather(1, group), unit)
    return _Cuts(group_start, group_start.gather(1, group) + unit, num_units)


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat([counts.new_zeros((counts.shape[0], 1)), counts.cumsum(1)], dim=1)


def _list(tables: StepTables, groups: _Groups, plan: TilePlan, positions: torch.Tensor, cuts: _Cuts) -> TileList:
    edges = torch.cat([cuts.group_start, cuts.range_start], dim=1).sort(dim=1).values
    starts, real = edges[:, :-1], edges[:, 1:] > edges[:, :-1]
    width = int(real.sum(dim=1).max())
    layer, column = real.nonzero(as_tuple=True)
    index = real.long().cumsum(1)[layer, column] - 1
    start, end = edges[layer, column], edges[layer, column + 1]
    group = torch.searchsorted(cuts.group_start, starts.contiguous(), right=True)[layer, column] - 1
    group_first = cuts.group_start[layer, group]
    first_unit = start - group_first
    num_units = torch.minimum(end - group_first, cuts.num_units[layer, group]) - first_unit
    num_rows, sequence = groups.num_rows[group], groups.sequence[group]
    page_units, begin = groups.page_units[group], tables.page_starts.long()[sequence]
    last = tables.page_starts.long()[sequence + 1]
    first_page = torch.minimum(begin + torch.minimum(first_unit, page_units) * plan.shape.unit_pages, last)
    splits, first_split = _splits(layer, group, index, (real.shape[0], groups.head.shape[0]))
    logits, num_logits = _logit_places(layer, num_units * num_rows * plan.shape.group, groups.records[group], plan)
    columns = (
        sequence, groups.head[group], groups.first_row[group], num_rows, first_unit, num_units, page_units,
        positions[first_page] - positions[begin], positions[last] - positions[begin],
        torch.where(groups.squares[group], ~first_split, first_split), splits, logits,
    )  # fmt: skip
    tiles = torch.zeros((real.shape[0], width, len(TILE_FIELDS)), dtype=torch.int32)
    tiles[layer, index] = torch.stack(columns, dim=1).int()
    before = _starts(real.long())
    block_tiles = before.gather(1, torch.searchsorted(edges, cuts.range_start)).int()
    return TileList(tiles, block_tiles, num_logits)


def _splits(
    layer: torch.Tensor, group: torch.Tensor, index: torch.Tensor, size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every tile: how many tiles its group has, and the first of them."""
    key = layer * size[1] + group
    count = torch.zeros(size[0] * size[1], dtype=torch.int64).index_add_(0, key, torch.ones_like(key))
    first = torch.full_like(count, torch.iinfo(torch.int64).max).scatter_reduce_(0, key, index, "amin")
    return count[key], first[key]


def _logit_places(
    layer: torch.Tensor, rows_units: torch.Tensor, records: torch.Tensor, plan: TilePlan
) -> tuple[torch.Tensor, int]:
    """Where each tile keeps its logits [query rows, units * unit_keys] in its layer, in 16 floats; how many in all."""
    sizes = torch.where(records, rows_units * (plan.shape.unit_keys // STEP_KEYS), 0)
    ends = sizes.cumsum(0)
    before_layer = torch.zeros(int(layer.max()) + 1, dtype=torch.int64).index_add_(0, layer, sizes).cumsum(0)
    before_layer = torch.cat([before_layer.new_zeros(1), before_layer])
    places = torch.where(records, ends - sizes - before_layer[layer], -1)
    return places, int(before_layer.diff().max())
