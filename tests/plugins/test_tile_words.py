"""Tile lists packed for the TensorRT plugins: nothing is lost, and room suffices for every step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plugins.attend.params import RECORD_SQUARES, LayerBlocks, StepTables
from plugins.attend.plugin import AttendPlugin, attend_fields, kv_shape
from plugins.attend.tile_words import (
    MAX_MULTIPROCESSORS,
    StepKernels,
    TileWords,
    most_step_words,
    pack_score,
    pack_step,
)
from plugins.attend.tiles import TilePlan, build_tiles, recorded_rows, split_rows
from plugins.kv_tiles import TILE_FIELDS
from tests.plugins.plugin_driver import BASE, no_compiler

LAYERS = 3
LOGIT_FLOATS = 16


def random_tables(seed: int, decodes: bool, kv_heads: int) -> StepTables:
    """A step of some sequences; pages and blocks ragged, some without any; the first adds squares up."""
    gen = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=gen, dtype=torch.int32)

    def starts(counts: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(-1).int()])

    sequences = int(numbers(1, 9, 1))
    rows = torch.ones(sequences, dtype=torch.int32) if decodes else numbers(1, 40, sequences)
    if not decodes:
        rows[0] = 40  # or chance could make it a decode step
    page_starts, row_starts = starts(numbers(0, 60, sequences)), starts(rows)
    lists = torch.stack([starts(numbers(0, 30, sequences * kv_heads)) for _ in range(LAYERS)])
    num_pages, num_blocks = int(page_starts[-1]), int(lists[:, -1].sum())
    first = torch.cat([torch.zeros(1, dtype=torch.int32), lists[:, -1].cumsum(0).int()]).tolist()
    record = numbers(0, 2, int(row_starts[-1])).to(torch.uint8)
    record[: row_starts[1]] *= RECORD_SQUARES
    return StepTables(
        row_starts, page_starts, numbers(0, 99, num_pages), numbers(1, BASE.page_tokens + 1, num_pages),
        record, torch.zeros(sequences, dtype=torch.int32),
        LayerBlocks(lists, numbers(0, 99, num_blocks), numbers(1, BASE.block_entries + 1, num_blocks), tuple(first)),
    )  # fmt: skip


def kernels_of(group: int) -> StepKernels:
    fields = replace(BASE, q_heads=group * BASE.kv_heads)
    return StepKernels.of(kv_shape(fields), fields.sm)


@pytest.mark.parametrize("group", [1, 3, 16])
@pytest.mark.parametrize("decodes", [False, True], ids=["chunks", "decode"])
@pytest.mark.parametrize("processors", [1, 4, 132])
def test_lists_come_back_as_they_were_built(group: int, decodes: bool, processors: int) -> None:
    kernels = kernels_of(group)
    for seed in range(6):
        tables = random_tables(seed, decodes, BASE.kv_heads)
        sequences, rows = tables.row_starts.shape[0] - 1, tables.record.shape[0]
        words = pack_step(tables, kernels, BASE.kv_heads, processors)
        layout = TileWords(kernels.all, BASE.kv_heads, processors).layout(sequences, rows, decodes)
        assert words.shape == (LAYERS, layout.words) and layout.words % 4 == 0
        assert len(layout.sections) == (1 if decodes else 3)
        for kernel, row_table, section in zip(kernels.all, split_rows(tables, group), layout.sections, strict=False):
            num_ranges = kernel.num_ranges(processors)
            plan = TilePlan(kernel.shape, BASE.kv_heads, kernel.query_rows, num_ranges)
            built = build_tiles(tables, row_table, plan)
            size = built.tiles[0].numel()
            assert section.tiles % 4 == 0 and size <= section.max_tiles * len(TILE_FIELDS)
            assert torch.equal(words[:, section.tiles :][:, :size], built.tiles.flatten(1))
            assert torch.equal(words[:, section.block_tiles :][:, : num_ranges + 1], built.block_tiles)
            if row_table.rows is not None:
                count = row_table.rows.shape[0]
                assert torch.equal(words[0, section.rows :][:count].long(), row_table.rows.long())


def test_places_depend_on_sizes_alone() -> None:
    """A captured graph replays with new tables of the same sizes."""
    kernels = kernels_of(3)
    tables = random_tables(1, True, BASE.kv_heads)
    other = replace(tables, page_lens=tables.page_lens.flip(0), page_starts=tables.page_starts // 2)
    words = [pack_step(some, kernels, BASE.kv_heads, 8) for some in (tables, other)]
    assert words[0].shape == words[1].shape and not torch.equal(*words)


@pytest.mark.parametrize("group", [1, 4, 16])
def test_an_engines_room_suffices(group: int) -> None:
    kernels = kernels_of(group)
    most = most_step_words(kernels, BASE.kv_heads, num_sequences=8, num_rows=320)
    for seed in range(8):
        for decodes in (False, True):
            tables = random_tables(seed, decodes, BASE.kv_heads)
            for processors in (1, MAX_MULTIPROCESSORS):
                assert pack_step(tables, kernels, BASE.kv_heads, processors).shape[1] <= most
                assert pack_score(tables, kernels.score, BASE.kv_heads, processors).shape[1] <= most


@pytest.mark.parametrize("group", [1, 3, 5, 16])
@pytest.mark.parametrize("decodes", [False, True], ids=["chunks", "decode"])
def test_the_workspace_has_room_for_all_logits(group: int, decodes: bool) -> None:
    fields = attend_fields(replace(BASE, q_heads=group * BASE.kv_heads), LAYERS, 0.125, no_compiler)
    kernel = fields.kernels.decode
    plan = TilePlan(kernel.shape, BASE.kv_heads, kernel.query_rows, kernel.num_ranges(4))
    for seed in range(12):
        tables = random_tables(seed, decodes, BASE.kv_heads)
        built = build_tiles(tables, split_rows(tables, group)[0], plan)
        size = {
            "S": tables.row_starts.shape[0] - 1, "R": tables.record.shape[0], "P": tables.page_ids.shape[0],
            "B": int(tables.blocks.starts[:, -1].max()), "kv_heads": BASE.kv_heads,
        }  # fmt: skip
        assert built.num_logits * LOGIT_FLOATS <= AttendPlugin.num_logits(fields, size, decodes)


def test_score_packs_recorded_rows() -> None:
    kernels, tables = kernels_of(3), random_tables(2, False, BASE.kv_heads)
    words = pack_score(tables, kernels.score, BASE.kv_heads, 4)
    layout = TileWords((kernels.score,), BASE.kv_heads, 4).layout(
        tables.row_starts.shape[0] - 1, tables.record.shape[0], decodes=False
    )
    (section,) = layout.sections
    rows = recorded_rows(tables).rows
    assert rows is not None and rows.shape[0] > 0
    assert torch.equal(words[1, section.rows :][: rows.shape[0]].long(), rows.long())
