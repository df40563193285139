"""Torch form of `score`: per sequence and KV head, keys are gathered once; recording rows run in tiles."""

from __future__ import annotations

from collections.abc import Callable

import torch

from plugins.attend.params import RECORD_SQUARES
from plugins.blocks import read_bias, read_keys
from plugins.score.params import ScoreParams

TILE_LOGITS = 1 << 21
Reduce = Callable[..., torch.Tensor]


def score(params: ScoreParams) -> None:
    """`plugins.score.params.ScoreForm`: raises params.seen and params.score, in place."""
    tables, starts = params.tables, params.tables.row_starts.tolist()
    record = tables.record.bool()
    for sequence in range(len(starts) - 1):
        first, last = starts[sequence], starts[sequence + 1]
        rows = record[first:last].nonzero()[:, 0] + first
        if rows.shape[0] == 0:
            continue
        # How many of the newest page tokens each row does not record.
        hidden = last - 1 - rows + int(tables.record_skip[sequence])
        for g in range(params.pages.shape[1]):
            _score_pages(params, (sequence, g), rows, hidden)
            _score_blocks(params, (sequence, g), rows)


def _score_pages(params: ScoreParams, part: tuple[int, int], rows: torch.Tensor, hidden: torch.Tensor) -> None:
    sequence, g = part
    tables, page_tokens = params.tables, params.pages.shape[3]
    begin, end = (int(x) for x in tables.page_starts[sequence : sequence + 2])
    ids, lens = tables.page_ids[begin:end].long(), tables.page_lens[begin:end]
    filled = (torch.arange(page_tokens, device=ids.device) < lens[:, None]).reshape(-1).nonzero()[:, 0]
    page, offset = ids[filled // page_tokens], filled % page_tokens
    if page.shape[0] == 0:
        return
    keys = params.pages[page, g, 0, offset].float()
    newness = torch.arange(page.shape[0] - 1, -1, -1, device=ids.device)  # 0: the newest
    found = _found(params, g, rows, keys, (None, newness[None] < hidden[:, None]))
    _, combine = _recording(params, rows)
    params.seen[page, g, offset] = combine(params.seen[page, g, offset].float(), found).half()


def _score_blocks(params: ScoreParams, part: tuple[int, int], rows: torch.Tensor) -> None:
    sequence, g = part
    tables, layout = params.tables, params.block_layout
    index = sequence * params.pages.shape[1] + g
    begin, end = (int(x) for x in tables.block_starts[index : index + 2])
    if begin == end:
        return
    ids, lens = tables.block_ids[begin:end].long(), tables.block_lens[begin:end]
    raw = params.blocks.index_select(0, ids)
    item, entry = (torch.arange(layout.block_entries, device=ids.device) < lens[:, None]).nonzero(as_tuple=True)
    keys, bias = read_keys(raw, layout)[item, entry], read_bias(raw, layout)[item, entry]
    found = _found(params, g, rows, keys, (bias, None))
    _, combine = _recording(params, rows)
    block = ids[item]
    params.score[block, entry] = combine(params.score[block, entry].float(), found).half()


def _recording(params: ScoreParams, rows: torch.Tensor) -> tuple[Reduce, Reduce]:
    """How weights of many rows [rows, group, n] become one [n], and how that joins what is there."""
    if bool((params.tables.record[rows] == RECORD_SQUARES).any()):
        return torch.linalg.vector_norm, torch.hypot
    return torch.amax, torch.maximum


def _found(
    params: ScoreParams,
    g: int,
    rows: torch.Tensor,
    keys: torch.Tensor,
    rest: tuple[torch.Tensor | None, torch.Tensor | None],
) -> torch.Tensor:
    """Largest weights, or their norm [n] fp32, of keys [n, D] fp32.

    rest: bias [n], and which keys a row leaves out [rows, n] bool.
    """
    bias, left_out = rest
    group = params.q.shape[1] // params.pages.shape[1]
    heads = slice(g * group, (g + 1) * group)
    found, (reduce, combine) = keys.new_zeros(keys.shape[0]), _recording(params, rows)
    step = max(1, TILE_LOGITS // (group * keys.shape[0]))
    for tile in range(0, rows.shape[0], step):
        members = rows[tile : tile + step]
        logits = params.q[members, heads].float() @ keys.T * params.scale
        if bias is not None:
            logits += bias
        lse = params.lse[members, heads]
        weights = (logits - torch.where(lse == -torch.inf, torch.inf, lse)[..., None]).exp_()
        if left_out is not None:
            weights.masked_fill_(left_out[tile : tile + step, None], 0.0)
        found = combine(found, reduce(weights, dim=(0, 1)))
    return found
