"""Brute-force form of `attend` in float64: loops, no tricks, nothing mutated. What the other forms are held to."""

from __future__ import annotations

import math

import torch

from plugins.attend.params import RECORD_SQUARES, RECORD_SUM, AttendParams
from plugins.blocks import read_bias, read_keys, read_values

Token = tuple[torch.Tensor, torch.Tensor, float, tuple[int, int, bool]]
"""Key [D], value [D], bias, and the place (page or block id, offset, is_block) where its largest weight goes."""


def attend(params: AttendParams) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns out [rows, q_heads, D] float64 and the raised seen and score, in their shapes, float64."""
    tables, q = params.tables, params.q
    kv_heads = params.pages.shape[1]
    group_size = q.shape[1] // kv_heads
    out = torch.zeros(q.shape, dtype=torch.float64)
    seen, score = params.seen.double(), params.score.double()
    row_starts = tables.row_starts.tolist()
    for sequence in range(len(row_starts) - 1):
        first, last = row_starts[sequence], row_starts[sequence + 1]
        skip = int(tables.record_skip[sequence])
        for g in range(kv_heads):
            page_tokens = _page_tokens(params, sequence, g)
            entries = _block_entries(params, sequence, g)
            for row in range(first, last):
                num_pages = max(0, len(page_tokens) - (last - 1 - row))
                visible = page_tokens[:num_pages] + entries
                unrecorded = range(max(0, num_pages - skip), num_pages)
                for h in range(g * group_size, (g + 1) * group_size):
                    weights = _weights(q[row, h].double(), visible, params.scale)
                    for i, (weight, (_, value, _, place)) in enumerate(zip(weights, visible, strict=True)):
                        where, offset, is_block = place
                        out[row, h] += weight * value
                        if not tables.record[row] or i in unrecorded:
                            continue
                        if tables.record[row] == RECORD_SUM:
                            target = score[where] if is_block else seen[where, g]
                            target[offset] += weight / group_size
                            continue
                        combine = math.hypot if tables.record[row] == RECORD_SQUARES else max
                        if is_block:
                            score[where, offset] = combine(float(score[where, offset]), weight)
                        else:
                            seen[where, g, offset] = combine(float(seen[where, g, offset]), weight)
    return out, seen, score


def _weights(query: torch.Tensor, tokens: list[Token], scale: float) -> list[float]:
    """Softmax of scale * q.k + bias over `tokens`."""
    if not tokens:
        return []
    logits = (torch.stack([t[0] for t in tokens]) @ query * scale).tolist()
    logits = [logit + t[2] for logit, t in zip(logits, tokens, strict=True)]
    top = max(logits)
    powers = [math.exp(logit - top) for logit in logits]
    return [power / sum(powers) for power in powers]


def _page_tokens(params: AttendParams, sequence: int, g: int) -> list[Token]:
    tables = params.tables
    tokens: list[Token] = []
    for i in range(int(tables.page_starts[sequence]), int(tables.page_starts[sequence + 1])):
        page = int(tables.page_ids[i])
        for offset in range(int(tables.page_lens[i])):
            key, value = params.pages[page, g, :, offset].double()
            tokens.append((key, value, 0.0, (page, offset, False)))
    return tokens


def _block_entries(params: AttendParams, sequence: int, g: int) -> list[Token]:
    tables, layout = params.tables, params.block_layout
    part = sequence * params.pages.shape[1] + g
    entries: list[Token] = []
    for i in range(int(tables.block_starts[part]), int(tables.block_starts[part + 1])):
        block = int(tables.block_ids[i])
        raw = params.blocks[block : block + 1]
        keys, values, bias = (f(raw, layout)[0].double() for f in (read_keys, read_values, read_bias))
        for offset in range(int(tables.block_lens[i])):
            entries.append((keys[offset], values[offset], float(bias[offset]), (block, offset, True)))
    return entries
