"""Brute-force form of `score` in float64: loops, nothing mutated. What the other forms are held to."""

from __future__ import annotations

import math

import torch

from plugins.attend.params import RECORD_SQUARES
from plugins.blocks import read_bias, read_keys
from plugins.score.params import ScoreParams


def score(params: ScoreParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the raised seen and score, in their shapes, float64."""
    seen, scores = params.seen.double(), params.score.double()
    tables = params.tables
    kv_heads = params.pages.shape[1]
    group_size = params.q.shape[1] // kv_heads
    row_starts = tables.row_starts.tolist()
    for sequence in range(len(row_starts) - 1):
        first, last = row_starts[sequence], row_starts[sequence + 1]
        for g in range(kv_heads):
            for row in range(first, last):
                if not tables.record[row]:
                    continue
                limit = -(last - 1 - row) - int(tables.record_skip[sequence])
                for head in range(g * group_size, (g + 1) * group_size):
                    _record_pages(params, seen, (sequence, g, row, head), limit)
                    _record_blocks(params, scores, (sequence, g, row, head))
    return seen, scores


def _weight(params: ScoreParams, row: int, head: int, key: torch.Tensor, bias: float) -> float:
    lse = float(params.lse[row, head])
    if lse == -math.inf:
        return 0.0
    return math.exp(float(params.q[row, head].double() @ key) * params.scale + bias - lse)


def _joined(params: ScoreParams, row: int, before: float, weight: float) -> float:
    """What is recorded once the row's weight joins what was."""
    return math.hypot(before, weight) if params.tables.record[row] == RECORD_SQUARES else max(before, weight)


def _record_pages(params: ScoreParams, seen: torch.Tensor, where: tuple[int, int, int, int], limit: int) -> None:
    """limit: how many page tokens the row records, less all there are."""
    sequence, g, row, head = where
    tables = params.tables
    items = range(int(tables.page_starts[sequence]), int(tables.page_starts[sequence + 1]))
    places = [(int(tables.page_ids[i]), offset) for i in items for offset in range(int(tables.page_lens[i]))]
    for page, offset in places[: max(0, len(places) + limit)]:
        weight = _weight(params, row, head, params.pages[page, g, 0, offset].double(), 0.0)
        seen[page, g, offset] = _joined(params, row, float(seen[page, g, offset]), weight)


def _record_blocks(params: ScoreParams, scores: torch.Tensor, where: tuple[int, int, int, int]) -> None:
    sequence, g, row, head = where
    tables, layout = params.tables, params.block_layout
    part = sequence * params.pages.shape[1] + g
    for i in range(int(tables.block_starts[part]), int(tables.block_starts[part + 1])):
        block = int(tables.block_ids[i])
        raw = params.blocks[block : block + 1]
        keys, bias = read_keys(raw, layout)[0].double(), read_bias(raw, layout)[0].double()
        for entry in range(int(tables.block_lens[i])):
            weight = _weight(params, row, head, keys[entry], float(bias[entry]))
            scores[block, entry] = _joined(params, row, float(scores[block, entry]), weight)
