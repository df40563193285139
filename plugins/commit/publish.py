"""Second half of a commit: write the blocks it keeps. Everything of one layer is read before it is written."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from plugins import blocks as block_bytes
from plugins.commit.absorb import merge, nearest_kept
from plugins.commit.entries import Entries
from plugins.commit.params import Decision, PublishParams, RowTable
from plugins.commit.pooling import NO_GROUP, Merging, pool
from plugins.memory import KvMemory


@dataclass(frozen=True, eq=False)
class Rewrite:
    """Entries in blocks that stay and took others in: block id, offset [m] int64; values [m, D], bias [m] fp32."""

    block: torch.Tensor
    offset: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, eq=False)
class RowOutcome:
    """written: entries for the row's new blocks, in order."""

    written: Entries
    rewrite: Rewrite | None
    absorbed: int
    dropped: int


def publish(memory: KvMemory, params: PublishParams, decision: Decision) -> tuple[int, int]:
    """Writes new blocks, merges into those that stay, copies moved tokens; returns (absorbed, dropped) counts."""
    check_tables(memory, params, decision)
    kv_heads = memory.pages[0].shape[1]
    absorbed = dropped = 0
    for layer in range(len(memory.pages)):
        staged = _token_slots(memory.pages[layer], params.staged).float()
        outcomes = []
        for head in range(kv_heads):
            row = layer * kv_heads + head
            outcomes.append(_commit_row(memory, params, decision, row, staged[:, head]))
        _move_tokens(memory, params, layer)
        _write_layer(memory, params, layer, outcomes)
        absorbed += sum(outcome.absorbed for outcome in outcomes)
        dropped += sum(outcome.dropped for outcome in outcomes)
    return absorbed, dropped


def check_tables(memory: KvMemory, params: PublishParams, decision: Decision) -> None:
    """The plan must say per row: the blocks that stay, then as many new ones as the decision fills."""
    size = memory.layout.block_entries
    alive = decision.alive.sum(dim=1).tolist()
    new_kept = decision.staged_keep.sum(dim=1).tolist()
    old_ids, old_lens = params.old.ids.tolist(), params.old.lens.tolist()
    new_ids, new_lens = params.new.ids.tolist(), params.new.lens.tolist()
    dissolve, is_new = params.dissolve.tolist(), params.is_new.tolist()
    assert len(params.old.starts) == len(params.new.starts) == memory.num_rows + 1
    for row in range(memory.num_rows):
        old, new = _row_range(params.old, row), _row_range(params.new, row)
        stays = [(old_ids[b], old_lens[b]) for b in old if not dissolve[b]]
        written = new_kept[row] + sum(alive[b] for b in old if dissolve[b])
        lens = [size] * (written // size) + ([written % size] if written % size else [])
        assert [(new_ids[b], new_lens[b]) for b in new if not is_new[b]] == stays, f"row {row}: staying blocks differ"
        assert [new_lens[b] for b in new if is_new[b]] == lens, f"row {row}: new blocks do not hold {written} entries"
        assert [is_new[b] for b in new] == [False] * len(stays) + [True] * len(lens), f"row {row}: new blocks not last"


def _row_range(table: RowTable, row: int) -> range:
    return range(table.starts[row], table.starts[row + 1])


def _token_slots(pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """K and V of tokens of one layer, [n, G, 2, D]."""
    page = torch.div(slots, pages.shape[3], rounding_mode="floor")
    return pages.permute(0, 3, 1, 2, 4)[page, slots - page * pages.shape[3]]


def _commit_row(
    memory: KvMemory, params: PublishParams, decision: Decision, row: int, staged: torch.Tensor
) -> RowOutcome:
    """staged [n, 2, D] fp32: K and V of the staged tokens in this row's head."""
    old = slice(params.old.starts[row], params.old.starts[row + 1])
    gone = params.dissolve[old]
    entries = Entries(staged[:, 0], staged[:, 1], staged.new_zeros(staged.shape[0]), decision.staged_score[row])
    keep = decision.staged_keep[row]
    if decision.exact is not None:
        moves = torch.ones_like(keep).index_fill(0, decision.exact[row], False)
        entries, keep = entries[moves], keep[moves]
    if bool(gone.any()):
        dissolved, alive = _read_dissolved(memory, params, decision, old)
        entries, keep = _concat(dissolved, entries), torch.cat((alive, keep))
    pooled = 0
    if decision.pooling is not None:
        merging = Merging(decision.pooling, None if decision.merger is None else decision.merger.row(row))
        entries, left = pool(entries, keep, _groups(memory, params, decision, row), merging)
        pooled = left.shape[0] - int(left.sum())
        entries, keep = entries[left], keep[left]
    kept, below = entries[keep], entries[~keep]
    if params.absorb_gate is None or below.keys.shape[0] == 0:
        return RowOutcome(kept, None, pooled, below.keys.shape[0])
    staying = params.old.ids[old][~gone]
    outcome = _absorb_row(memory, params.absorb_gate, (kept, below), staying, decision.alive[old][~gone])
    return replace(outcome, absorbed=outcome.absorbed + pooled)


def _groups(memory: KvMemory, params: PublishParams, decision: Decision, row: int) -> torch.Tensor:
    """Groups of the row's dissolved entries and staged tokens, in the order of `_commit_row`, [n] int64."""
    assert decision.staged_group is not None
    old = slice(params.old.starts[row], params.old.starts[row + 1])
    gone = params.dissolve[old]
    filled = torch.arange(memory.layout.block_entries, device=gone.device) < params.old.lens[old][gone][:, None]
    if decision.old_group is None:
        dissolved = torch.full((int(filled.sum()),), NO_GROUP, dtype=torch.int64, device=gone.device)
    else:
        assert not bool((decision.old_group[old][~gone] >= 0).any()), f"row {row}: a block with a group stays"
        dissolved = decision.old_group[old][gone][filled]
    return torch.cat((dissolved, decision.staged_group[row]))


def _concat(a: Entries, b: Entries) -> Entries:
    return Entries(
        torch.cat((a.keys, b.keys)),
        torch.cat((a.values, b.values)),
        torch.cat((a.bias, b.bias)),
        torch.cat((a.score, b.score)),
    )


def _read_dissolved(
    memory: KvMemory, params: PublishParams, decision: Decision, old: slice
) -> tuple[Entries, torch.Tensor]:
    """Filled entries of the row's dissolved blocks, in table order, and which of them are above the line."""
    layout = memory.layout
    gone = params.dissolve[old]
    ids, lens = params.old.ids[old][gone], params.old.lens[old][gone]
    filled = torch.arange(layout.block_entries, device=ids.device) < lens[:, None]
    raw = memory.blocks.index_select(0, ids)
    keys, values = block_bytes.read_keys(raw, layout)[filled], block_bytes.read_values(raw, layout)[filled]
    bias, score = block_bytes.read_bias(raw, layout)[filled], memory.score[ids].float()[filled]
    return Entries(keys, values, bias, score), decision.alive[old][gone][filled]


def _absorb_row(
    memory: KvMemory, gate: float, entries: tuple[Entries, Entries], staying: torch.Tensor, alive: torch.Tensor
) -> RowOutcome:
    """Absorbs what is below into kept entries of new blocks and above-line entries of the blocks that stay.

    Protected entries are never merged, so they absorb nothing.
    """
    kept, below = entries
    block, offset = alive.nonzero(as_tuple=True)
    keys, allowed, num_kept = kept.keys, kept.score.isfinite(), kept.keys.shape[0]
    if staying.shape[0]:
        stay_keys = block_bytes.read_keys(memory.blocks.index_select(0, staying), memory.layout)[alive]
        stay_score = memory.score.index_select(0, staying)[alive]
        keys, allowed = torch.cat((keys, stay_keys)), torch.cat((allowed, stay_score.isfinite()))
    nearest, near = nearest_kept(below.keys, keys, allowed, gate)
    absorbed = int(near.sum())
    dropped = below.keys.shape[0] - absorbed
    if absorbed == 0:
        return RowOutcome(kept, None, 0, dropped)
    taken, target = below[near], nearest[near]
    in_new = target < num_kept
    if bool(in_new.any()):
        values, bias = merge(kept, taken[in_new], target[in_new])
        kept = replace(kept, values=values, bias=bias)
    rewrite = None
    if not bool(in_new.all()):
        places, target = torch.unique(target[~in_new] - num_kept, return_inverse=True)
        where = (staying[block[places]], offset[places])
        rewrite = _rewrite(memory, where, taken[~in_new], target)
    return RowOutcome(kept, rewrite, absorbed, dropped)


def _rewrite(
    memory: KvMemory, where: tuple[torch.Tensor, torch.Tensor], taken: Entries, target: torch.Tensor
) -> Rewrite:
    values, bias = block_bytes.values_at(memory.blocks, where, memory.layout)
    score = memory.score[where].float()
    values, bias = merge(Entries(values, values, bias, score), taken, target)
    return Rewrite(*where, values, bias)


def _move_tokens(memory: KvMemory, params: PublishParams, layer: int) -> None:
    """Copies K, V and seen of protected tokens of one layer from slot to slot."""
    if params.move_from.shape[0] == 0:
        return
    page_tokens = memory.pages[layer].shape[3]
    source, destination = (
        (torch.div(s, page_tokens, rounding_mode="floor"), s % page_tokens) for s in (params.move_from, params.move_to)
    )
    for arena in (memory.pages[layer].permute(0, 3, 1, 2, 4), memory.seen[layer].permute(0, 2, 1)):
        arena[destination] = arena[source]


def _write_layer(memory: KvMemory, params: PublishParams, layer: int, outcomes: list[RowOutcome]) -> None:
    """Fills the layer's new blocks and rewrites merged entries of those that stay."""
    layout, new = memory.layout, params.new
    rows = range(layer * len(outcomes), (layer + 1) * len(outcomes))
    part = slice(new.starts[rows.start], new.starts[rows.stop])
    is_new = params.is_new[part]
    ids, lens = new.ids[part][is_new], new.lens[part][is_new]
    count, size = ids.shape[0], layout.block_entries
    device = memory.blocks.device
    keys, values = (torch.zeros((count * size, layout.head_dim), device=device) for _ in range(2))
    bias, score = (torch.zeros(count * size, device=device) for _ in range(2))
    start = 0
    for outcome in outcomes:
        written = outcome.written
        filled = slice(start, start + written.keys.shape[0])
        keys[filled], values[filled], bias[filled] = written.keys, written.values, written.bias
        score[filled] = written.score
        start += -(-written.keys.shape[0] // size) * size
    if count:
        shape = (count, size, layout.head_dim)
        entries = (keys.view(shape), values.view(shape), bias.view(count, size), lens)
        raw = block_bytes.encode(*entries, layout, score.view(count, size))
        memory.blocks.index_copy_(0, ids, raw)
        memory.score.index_copy_(0, ids, score.view(count, size).half())
    for rewrite in (outcome.rewrite for outcome in outcomes):
        if rewrite is not None:
            where = (rewrite.block, rewrite.offset)
            block_bytes.write_values(memory.blocks, where, rewrite.values, layout)
            block_bytes.write_bias(memory.blocks, where, rewrite.bias, layout)
