"""First half of a commit: one line over everything a conversation has committed or staged, found by selection.

Scores of all rows lie in one padded matrix. The floor takes each row's best entries, protected ones stay, and the
k-th largest of the rest is the line. Ties at a threshold are broken by position, so that counts are exact.

On a device nothing here waits for it, so that the lines of several conversations can be launched one behind the other;
super tokens and redundancy alone look at values in between.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from plugins import blocks as block_bytes
from plugins.commit.gate import gate_logits
from plugins.commit.params import Decision, LineParams
from plugins.commit.pooled_line import Drawn, pooled_decision
from plugins.commit.redundancy import rank_row
from plugins.commit.selection import best_above, best_of_groups
from plugins.memory import KvMemory

UNFILLED = -1.0


def draw_line(memory: KvMemory, params: LineParams) -> Decision:
    """Decides which staged tokens and old entries stay: max(keep_entries, forced by floor and protection) of them,
    group by group where there are quotas, or all that rank above `choices.threshold`."""
    choices = params.choices
    staged, old = score_staged(memory, params), _old_scores(memory, params)
    if params.outlier_z is not None:
        staged = _protect_outliers(staged, old, params.outlier_z)
    scores = torch.cat((old, staged), dim=1)
    num_old = old.shape[1]
    rank = _ranks(memory, params, scores, num_old)
    filled = scores >= 0
    kept = scores.isinf() | _best_of_rows(rank, filled, params.floor_entries)
    if not choices.redraw:
        kept[:, :num_old] |= filled[:, :num_old]
    line: float | torch.Tensor
    if choices.threshold is not None:
        line = choices.threshold
        kept |= filled & (rank > line)
    else:
        line = _fill_quotas(kept, rank, filled, params.quotas or (params.keep_entries,))
    row, column = _places(params, memory.layout.block_entries)
    entries = torch.arange(memory.layout.block_entries, device=scores.device)
    places = (row[:, None], column[:, None] + entries)
    if choices.pooling is not None:
        return pooled_decision(memory, params, Drawn(line, kept, staged, old, places))
    return Decision(line, kept[:, num_old:], staged, kept[places])


def staged_scores(memory: KvMemory, slots: torch.Tensor) -> torch.Tensor:
    """Largest attention weight each staged token has received so far, [rows, n] fp32."""
    page, offset = _split_slots(slots, memory)
    by_layer = torch.stack([seen.permute(0, 2, 1)[page, offset] for seen in memory.seen])
    return by_layer.permute(0, 2, 1).reshape(memory.num_rows, -1).float()


def staged_kv(memory: KvMemory, slots: torch.Tensor) -> torch.Tensor:
    """K and V of the staged tokens, [rows, n, 2, D] in the pages' dtype."""
    page, offset = _split_slots(slots, memory)
    by_layer = torch.stack([pages.permute(0, 3, 1, 2, 4)[page, offset] for pages in memory.pages])
    return by_layer.permute(0, 2, 1, 3, 4).flatten(0, 1)


def score_staged(memory: KvMemory, params: LineParams) -> torch.Tensor:
    """The score that is stored with each staged token, [rows, n] fp32; see `LineChoices.score`."""
    choices = params.choices
    if choices.score == "recorded":
        scores = staged_scores(memory, params.staged)
        width = choices.smooth
        return torch.nn.functional.max_pool1d(scores, width, 1, width // 2) if width > 1 and scores.numel() else scores
    assert params.positions is not None, f"score {choices.score} needs positions"
    if choices.score == "position":
        # As the score arena will hold them, so that what is new and what is old are compared alike.
        return (params.positions + 1).half().float().expand(memory.num_rows, -1).contiguous()
    assert params.gate is not None, "score gate needs a trained gate"
    return gate_logits(staged_kv(memory, params.staged), params.positions, params.gate).sigmoid()


def _ranks(memory: KvMemory, params: LineParams, scores: torch.Tensor, num_old: int) -> torch.Tensor:
    """What entries compete with, [rows, columns] fp32, not negative; UNFILLED where nothing lies, inf as protected."""
    scaled = torch.where((scores >= 0) & scores.isfinite(), scores * _row_scale(memory, params), scores)
    choices = params.choices
    if choices.redundancy is None:
        return scaled
    # Stored positions say nothing of importance: then old entries do not compete, and new ones do by what was recorded.
    assert choices.score == "recorded" or not choices.redraw, "old entries have no recorded scores to compete with"
    importance = torch.cat((scores[:, :num_old], staged_scores(memory, params.staged)), dim=1)
    ranked = (scores >= 0) & scores.isfinite()
    ranked[:, :num_old] &= choices.redraw
    keys = staged_kv(memory, params.staged)[:, :, 0].float()
    old_keys = block_bytes.read_keys(memory.blocks.index_select(0, params.table.ids), memory.layout)
    for row in range(memory.num_rows):
        old = old_keys[params.table.starts[row] : params.table.starts[row + 1]].flatten(0, 1)
        row_keys = torch.cat((old, old.new_zeros(num_old - old.shape[0], old.shape[1]), keys[row]))
        where = ranked[row]
        scaled[row, where] = rank_row(row_keys[where], importance[row, where], choices.redundancy)
    return scaled


def _fill_quotas(
    kept: torch.Tensor, rank: torch.Tensor, filled: torch.Tensor, quotas: tuple[int, ...]
) -> float | torch.Tensor:
    """Lets in what is best in each group of rows until its quota is full; kept [rows, columns] bool changes in place.

    Returns the lowest rank that was let in.
    """
    rows, line = rank.shape[0] // len(quotas), torch.inf
    assert rows * len(quotas) == rank.shape[0], (rank.shape, len(quotas))
    if rank.device.type != "cpu":
        line_there, let_in = best_of_groups(rank, filled & ~kept, _sent(torch.tensor(quotas), rank.device), kept)
        kept |= let_in
        return line_there
    for i, quota in enumerate(quotas):
        part = slice(i * rows, (i + 1) * rows)
        rest = (filled[part] & ~kept[part]).view(-1)
        group_line, let_in = best_above(rank[part].reshape(-1)[rest], quota - int(kept[part].sum()))
        kept[part].view(-1)[rest] = let_in
        line = min(line, group_line)
    return line


def _split_slots(slots: torch.Tensor, memory: KvMemory) -> tuple[torch.Tensor, torch.Tensor]:
    page_tokens = memory.pages[0].shape[3]
    page = torch.div(slots, page_tokens, rounding_mode="floor")
    return page, slots - page * page_tokens


def _row_scale(memory: KvMemory, params: LineParams) -> torch.Tensor:
    """[rows, 1] factors on scores."""
    scale = torch.tensor(params.layer_scale or (1.0,) * len(memory.pages))
    return _sent(scale.repeat_interleave(memory.pages[0].shape[1])[:, None], memory.score.device)


def _sent(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small host table on `device`. Only a copy from pinned memory does not wait for what runs there."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


def _places(params: LineParams, block_entries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and first column of each old block in the padded matrix, [num_blocks] int64 each."""
    starts = _sent(torch.tensor(params.table.starts), params.table.ids.device)
    num_blocks = params.table.starts[-1] - params.table.starts[0]  # known here, so that no device is waited for
    row = torch.arange(starts.shape[0] - 1, device=starts.device).repeat_interleave(
        starts.diff(), output_size=num_blocks
    )
    return row, (torch.arange(row.shape[0], device=starts.device) - starts[row]) * block_entries


def _old_scores(memory: KvMemory, params: LineParams) -> torch.Tensor:
    """Scores of the old blocks, [rows, most blocks of a row * E] fp32, UNFILLED where no entry lies."""
    size, starts = memory.layout.block_entries, params.table.starts
    most = max(b - a for a, b in pairwise(starts))
    padded = torch.full((memory.num_rows, most * size), UNFILLED, device=memory.score.device)
    entries = torch.arange(size, device=memory.score.device)
    filled = entries < params.table.lens[:, None]
    score = torch.where(filled, memory.score.index_select(0, params.table.ids).float(), UNFILLED)
    row, column = _places(params, size)
    padded[row[:, None], column[:, None] + entries] = score
    return padded


def _protect_outliers(staged: torch.Tensor, old: torch.Tensor, z: float) -> torch.Tensor:
    """inf where a staged score lies more than z standard deviations over the mean of its row's finite scores."""
    scores = torch.cat((old, staged), dim=1)
    counted = (scores >= 0) & scores.isfinite()
    number = counted.sum(dim=1, keepdim=True).clamp_(min=1)
    mean = torch.where(counted, scores, 0.0).sum(dim=1, keepdim=True) / number
    spread = (torch.where(counted, scores - mean, 0.0).square().sum(dim=1, keepdim=True) / number).sqrt()
    return torch.where(staged > mean + z * spread, torch.inf, staged)


def _best_of_rows(scaled: torch.Tensor, filled: torch.Tensor, floor: int) -> torch.Tensor:
    """The best `floor` filled entries of each row, all of a row that has fewer. [rows, columns] bool."""
    floor = min(floor, scaled.shape[1])
    if floor <= 0:
        return torch.zeros_like(filled)
    threshold = scaled.topk(floor, dim=1).values[:, -1:]
    above = scaled > threshold
    ties = (scaled == threshold) & filled
    return above | (ties & (ties.cumsum(dim=1) <= floor - above.sum(dim=1, keepdim=True)))
