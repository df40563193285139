"""Tile lists kept from step to step are those built afresh, whatever changed between the steps."""

from __future__ import annotations

from dataclasses import replace

import torch

from plugins.attend.params import RECORD_SQUARES, LayerBlocks, StepTables
from plugins.attend.tiles import TileLists, TilePlan, build_tiles, split_rows
from plugins.kv_tiles import KvShape
from plugins.layout import BlockLayout, PageLayout

KV_HEADS, LAYERS, PAGE_TOKENS = 2, 3, 16
SHAPE = KvShape(PageLayout(LAYERS, KV_HEADS, 64, PAGE_TOKENS, 2), BlockLayout("k8v4", 64, 64), "fp16", 3)
PLANS = tuple(TilePlan(SHAPE, KV_HEADS, rows, 12, min_range_bytes=4096) for rows in (16, 64, 64))


def blocks_of(seed: int, sequences: int) -> LayerBlocks:
    """Ragged lists."""
    gen = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 5, (LAYERS, sequences * KV_HEADS), generator=gen)
    starts = torch.nn.functional.pad(counts.cumsum(1), (1, 0)).int()
    total = int(counts.sum())
    first = (0, *starts[:, -1].cumsum(0).tolist()[:-1])
    return LayerBlocks(
        starts, torch.arange(total, dtype=torch.int32), torch.full((total,), 64, dtype=torch.int32), first
    )


def tables_of(rows: list[int], tokens: list[int], blocks: LayerBlocks, record: int = 1) -> StepTables:
    """Sequences of `tokens` page tokens, of which the last `rows` are being run."""
    lens = [[min(PAGE_TOKENS, n - at) for at in range(0, n, PAGE_TOKENS)] for n in tokens]
    flat = [length for sequence in lens for length in sequence]

    def starts(counts: list[int]) -> torch.Tensor:
        return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)

    return StepTables(
        starts(rows), starts([len(x) for x in lens]), torch.arange(len(flat), dtype=torch.int32),
        torch.tensor(flat, dtype=torch.int32), torch.full((sum(rows),), record, dtype=torch.uint8),
        torch.zeros(len(rows), dtype=torch.int32), blocks,
    )  # fmt: skip


def same(lists: TileLists, tables: StepTables) -> None:
    for rows, plan in zip(split_rows(tables, SHAPE.group), PLANS, strict=True):
        kept, fresh = lists.build(tables, rows, plan), build_tiles(tables, rows, plan)
        assert torch.equal(kept.tiles, fresh.tiles) and torch.equal(kept.block_tiles, fresh.block_tiles)
        assert kept.num_logits == fresh.num_logits


def test_decode_steps_over_pages_that_fill_up() -> None:
    lists, blocks = TileLists(), blocks_of(1, 3)
    for step in range(40):
        same(lists, tables_of([1, 1, 1], [5 + step, 60 + step, 1 + step], blocks))


def test_lists_are_kept_while_only_lengths_change(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import plugins.attend.tiles as module

    built = []
    build = module._build
    monkeypatch.setattr(module, "_build", lambda *arguments: built.append(1) or build(*arguments))
    lists, blocks = TileLists(), blocks_of(1, 2)
    decode = PLANS[0]
    for step in range(16):  # both fill a page up: 17..32 of two pages, 65..80 of five
        tables = tables_of([1, 1], [17 + step, 65 + step], blocks)
        lists.build(tables, split_rows(tables, SHAPE.group)[0], decode)
    assert len(built) == 1
    tables = tables_of([1, 1], [33, 81], blocks)
    lists.build(tables, split_rows(tables, SHAPE.group)[0], decode)
    assert len(built) == 2, "new pages"


def test_every_other_change_builds_a_new_list() -> None:
    lists, blocks = TileLists(), blocks_of(1, 2)
    base = tables_of([1, 1], [20, 70], blocks)
    holes = base.page_ids.clone()
    holes[1] = -1
    for tables in (
        base,
        tables_of([1, 1], [21, 71], blocks_of(2, 2)),  # a commit
        tables_of([1, 1], [21, 71], blocks),
        tables_of([1, 1], [21, 71], blocks, record=0),
        tables_of([1, 1], [21, 71], blocks, record=RECORD_SQUARES),
        tables_of([1, 40], [22, 111], blocks, record=RECORD_SQUARES),
        tables_of([1, 40], [22, 111], blocks),
        tables_of([1, 30], [22, 101], blocks),  # a chunk
        tables_of([3, 30], [24, 101], blocks),
        replace(base, page_ids=holes),
        tables_of([1], [22], blocks_of(3, 1)),  # a conversation left
        tables_of([1, 1], [0, 70], blocks),
        base,
    ):
        same(lists, tables)
        same(lists, tables)
