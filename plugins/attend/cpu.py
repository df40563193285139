"""Torch form of `attend`: per sequence, pages and blocks are gathered once; rows run in tiles that bound memory.

The softmax over {page tokens} and {block entries} is one softmax in fp32: both parts share the row's maximum
and sum. Ragged heads need no padding: a block is one item of a batched product, and its maximum and sum are
reduced into its KV head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from plugins.attend.params import RECORD_SQUARES, RECORD_SUM, AttendParams, AttendStep, StepTables
from plugins.blocks import read_bias, read_keys, read_values
from plugins.memory import KvMemory

TILE_LOGITS = 1 << 21
LOWEST = -3.0e38


@dataclass(frozen=True, eq=False)
class PagePart:
    """keys, values [G, n, D] fp32 of one sequence's page tokens, in order; page, offset [n] their places."""

    keys: torch.Tensor
    values: torch.Tensor
    page: torch.Tensor
    offset: torch.Tensor


@dataclass(frozen=True, eq=False)
class BlockPart:
    """keys, values [n, E, D] fp32 (0 where unfilled), bias [n, E] fp32 (-inf where unfilled), head, ids [n] int64."""

    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor
    head: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True, eq=False)
class Weights:
    """Attention weights of a tile of rows.   pages [G, rows * group, n];   blocks [n, rows * group, E]."""

    pages: torch.Tensor
    blocks: torch.Tensor | None


class TorchAttend:
    """`plugins.attend.params.AttendForm` with torch's operations."""

    def begin(self, memory: KvMemory, tables: StepTables, scale: float) -> AttendStep:
        def step(layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
            where = (memory.pages[layer], memory.seen[layer], memory.blocks, memory.score, memory.layout)
            attend(AttendParams(q, out, *where, tables.layer(layer), scale))

        return step


def attend(params: AttendParams) -> None:
    """Writes params.out and raises params.seen and params.score, in place."""
    tables = params.tables
    row_starts, record, record_skip = tables.row_starts.tolist(), tables.record.bool(), tables.record_skip.tolist()
    for sequence in range(len(row_starts) - 1):
        first, last = row_starts[sequence], row_starts[sequence + 1]
        if first == last:
            continue
        pages, blocks = gather_pages(params, sequence), gather_blocks(params, sequence)
        reduce, combine = _recording(tables.record[first:last])
        page_top = blocks_top = None
        for start, end in _tiles(params, first, last, pages.page.shape[0]):
            hidden = last - start - torch.arange(1, end - start + 1, device=params.q.device)
            weights = attend_rows(params, (start, end), hidden, (pages, blocks))
            recorded = record[start:end]
            if not bool(recorded.any()):
                continue
            _skip_newest(weights.pages, hidden + record_skip[sequence])
            top = reduce(weights.pages, recorded)
            page_top = top if page_top is None else combine(page_top, top)
            if weights.blocks is not None:
                top = reduce(weights.blocks, recorded)
                blocks_top = top if blocks_top is None else combine(blocks_top, top)
        if page_top is not None:
            _raise_scores(params, (pages, blocks), (page_top, blocks_top), combine)


def _tiles(params: AttendParams, first: int, last: int, num_tokens: int) -> Iterator[tuple[int, int]]:
    """Row ranges [start, end) whose logits stay under TILE_LOGITS."""
    rows = max(1, TILE_LOGITS // max(1, params.q.shape[1] * num_tokens))
    for start in range(first, last, rows):
        yield start, min(last, start + rows)


def gather_pages(params: AttendParams, sequence: int) -> PagePart:
    """Page tokens that one sequence reads."""
    tables = params.tables
    begin, end = (int(x) for x in tables.page_starts[sequence : sequence + 2])
    ids, lens = tables.page_ids[begin:end].long(), tables.page_lens[begin:end]
    page_tokens = params.pages.shape[3]
    kv = params.pages.index_select(0, ids).permute(2, 1, 0, 3, 4).float()
    kv = kv.reshape(2, kv.shape[1], ids.shape[0] * page_tokens, kv.shape[4])
    filled = (torch.arange(page_tokens, device=ids.device) < lens[:, None]).reshape(-1)
    page = ids.repeat_interleave(page_tokens)
    offset = torch.arange(page_tokens, device=ids.device).repeat(ids.shape[0])
    num_filled = int(lens.sum())
    if bool(filled[:num_filled].all()):
        kv, page, offset = kv[:, :, :num_filled], page[:num_filled], offset[:num_filled]
    else:
        where = filled.nonzero()[:, 0]
        kv, page, offset = kv.index_select(2, where), page[where], offset[where]
    return PagePart(kv[0], kv[1], page, offset)


def gather_blocks(params: AttendParams, sequence: int) -> BlockPart | None:
    """Committed entries that one sequence reads; None where it has none."""
    tables, layout, kv_heads = params.tables, params.block_layout, params.pages.shape[1]
    starts = tables.block_starts[sequence * kv_heads : (sequence + 1) * kv_heads + 1].long()
    begin, end = int(starts[0]), int(starts[-1])
    if begin == end:
        return None
    ids = tables.block_ids[begin:end].long()
    raw = params.blocks.index_select(0, ids)
    filled = torch.arange(layout.block_entries, device=ids.device) < tables.block_lens[begin:end, None]
    keys, values = read_keys(raw, layout), read_values(raw, layout)
    empty = ~filled
    if bool(empty.any()):
        keys[empty] = 0.0
        values[empty] = 0.0
    bias = read_bias(raw, layout).masked_fill_(empty, -torch.inf)
    head = torch.arange(kv_heads, device=ids.device).repeat_interleave(starts.diff())
    return BlockPart(keys, values, bias, head, ids)


def attend_rows(
    params: AttendParams, rows: tuple[int, int], hidden: torch.Tensor, parts: tuple[PagePart, BlockPart | None]
) -> Weights:
    """Writes out for rows [start, end); row i does not see the last hidden[i] page tokens."""
    pages, blocks = parts
    start, end = rows
    kv_heads = params.pages.shape[1]
    group_size, head_dim = params.q.shape[1] // kv_heads, params.q.shape[2]
    q = params.q[start:end].float() * params.scale
    q = q.view(end - start, kv_heads, group_size, head_dim).transpose(0, 1).reshape(kv_heads, -1, head_dim)
    num_tokens = pages.page.shape[0]
    logits = torch.bmm(q, pages.keys.transpose(1, 2))
    if end - start > 1 or int(hidden[0]) > 0:
        behind = torch.arange(num_tokens - 1, -1, -1, device=q.device) < hidden[:, None]
        logits.view(kv_heads, end - start, group_size, num_tokens).masked_fill_(behind[:, None], -torch.inf)
    top = logits.amax(dim=-1) if num_tokens else q.new_full(q.shape[:2], -torch.inf)
    block_logits = None
    if blocks is not None:
        block_logits = torch.baddbmm(blocks.bias[:, None], q[blocks.head], blocks.keys.transpose(1, 2))
        block_top = block_logits.amax(dim=-1)
        top = top.scatter_reduce(0, blocks.head[:, None].expand_as(block_top), block_top, "amax")
    top = top.clamp_(min=LOWEST)
    page_weights = logits.sub_(top[..., None]).exp_()
    total = page_weights.sum(dim=-1)
    if block_logits is not None and blocks is not None:
        block_logits.sub_(top[blocks.head][..., None]).exp_()
        total.index_add_(0, blocks.head, block_logits.sum(dim=-1))
    share = 1.0 / total.clamp_(min=torch.finfo(torch.float32).tiny)
    out = torch.bmm(page_weights.mul_(share[..., None]), pages.values)
    if block_logits is not None and blocks is not None:
        block_logits.mul_(share[blocks.head][..., None])
        out.index_add_(0, blocks.head, torch.bmm(block_logits, blocks.values))
    out = out.view(kv_heads, end - start, group_size, head_dim).transpose(0, 1)
    params.out[start:end] = out.reshape(end - start, -1, head_dim)
    return Weights(page_weights, block_logits)


def _skip_newest(weights: torch.Tensor, skipped: torch.Tensor) -> None:
    """weights [G, rows * group, n]: 0 for the last skipped[i] page tokens of row i, in place."""
    (heads, vectors, num_tokens), rows = weights.shape, skipped.shape[0]
    newest = torch.arange(num_tokens - 1, -1, -1, device=weights.device) < skipped[:, None]
    weights.view(heads, rows, vectors // rows, num_tokens).masked_fill_(newest[:, None], 0.0)


def _recording(record: torch.Tensor) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """How weights of many rows become one, and how that joins what is there."""
    if bool((record == RECORD_SUM).any()):
        return _total, torch.add
    return (_norm, torch.hypot) if bool((record == RECORD_SQUARES).any()) else (_top, torch.maximum)


def _top(weights: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
    """weights [m, rows * group, n] -> largest over recorded rows and the group [m, n]."""
    return torch.amax(_by_row(weights, recorded), dim=(1, 2))


def _total(weights: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
    """weights [m, rows * group, n] -> sum over recorded rows of the mean over the group [m, n]."""
    return _by_row(weights, recorded).mean(dim=2).sum(dim=1)


def _norm(weights: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
    """weights [m, rows * group, n] -> Euclidean norm over recorded rows and the group [m, n]."""
    norms: torch.Tensor = torch.linalg.vector_norm(_by_row(weights, recorded), dim=(1, 2))
    return norms


def _by_row(weights: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
    """weights [m, rows * group, n] -> those of recorded rows [m, recorded rows, group, n]."""
    rows = recorded.shape[0]
    by_row = weights.view(weights.shape[0], rows, weights.shape[1] // rows, weights.shape[2])
    return by_row if bool(recorded.all()) else by_row[:, recorded]


def _raise_scores(
    params: AttendParams,
    parts: tuple[PagePart, BlockPart | None],
    tops: tuple[torch.Tensor, torch.Tensor | None],
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    pages, blocks = parts
    page_top, blocks_top = tops
    seen = params.seen.permute(0, 2, 1)
    where = (pages.page, pages.offset)
    seen[where] = combine(seen[where].float(), page_top.T).half()
    if blocks is not None and blocks_top is not None:
        old = params.score.index_select(0, blocks.ids)
        raised = torch.where(torch.isinf(blocks.bias), old, combine(old.float(), blocks_top).half())
        params.score.index_copy_(0, blocks.ids, raised)
