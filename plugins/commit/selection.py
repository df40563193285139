"""The best of some scores: exact counts, the first ones where scores tie."""

from __future__ import annotations

import torch


def best_above(scores: torch.Tensor, count: int) -> tuple[float, torch.Tensor]:
    """The line and a mask of the best `count` of scores [n], by selection on the host."""
    count = min(count, scores.shape[0])
    if count <= 0:
        return torch.inf, torch.zeros_like(scores, dtype=torch.bool)
    line = scores.kthvalue(scores.shape[0] - count + 1).values
    above = scores > line
    ties = scores == line
    return float(line), above | (ties & (ties.cumsum(dim=0) <= count - above.sum()))


def best_of_groups(
    rank: torch.Tensor, free: torch.Tensor, quotas: torch.Tensor, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for groups of consecutive rows at once, by sorting, and without a look at any value.

    rank [rows, columns] fp32 >= 0; free, kept [rows, columns] bool: what may be let in, what counts as let in already;
    quotas [groups] int64. Returns the lowest rank let in, of no dimension, and a mask [rows, columns].
    """
    groups = quotas.shape[0]
    candidates = torch.where(free, rank, -1.0).view(groups, -1)
    count = (quotas - kept.view(groups, -1).sum(dim=1)).minimum(free.view(groups, -1).sum(dim=1)).clamp(min=0)[:, None]
    if candidates.shape[1] == 0:
        return rank.new_full((), torch.inf), torch.zeros_like(free)
    ordered = candidates.sort(dim=1, descending=True).values
    line = torch.where(count > 0, ordered.gather(1, (count - 1).clamp(min=0)), torch.inf)
    above, ties = candidates > line, candidates == line
    let_in = above | (ties & (ties.cumsum(dim=1) <= count - above.sum(dim=1, keepdim=True)))
    return line.amin(), let_in.view(rank.shape)
