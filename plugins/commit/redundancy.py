"""Redundancy R-KV's ranking (2505.24133): importance minus redundancy, from the similarity of keys.

Within a row, S is the cosine similarity of all pairs of keys with 0 on the diagonal. Each entry takes back what it
says of the most recent entry that resembles it (S > SIMILAR), so that of a group of twins the newest counts as new.
Redundancy is the softmax over the row of the mean similarity that an entry receives; importance is the score divided
by the row's sum, so that both add up to 1. The rank is lambda * importance - (1 - lambda) * redundancy.

Ours differs from the paper in two points: importance is the largest weight recorded rather than the mean over a last
window, and old entries are compared in the order of their blocks, which is that of time but for rewritten ones.
"""

from __future__ import annotations

import torch

SIMILAR = 0.5
SHIFT = 1.0
"""Added to every rank so that none is negative."""


def redundancy(keys: torch.Tensor) -> torch.Tensor:
    """keys [n, D], oldest first -> share of redundancy [n] fp32, sum 1."""
    count = keys.shape[0]
    unit = torch.nn.functional.normalize(keys.float(), dim=1)
    similarity = (unit @ unit.T).fill_diagonal_(0.0)
    place = torch.arange(count, device=keys.device)
    newest = torch.where(similarity > SIMILAR, place, -1).amax(dim=1)
    tells = newest >= 0
    similarity[place[tells], newest[tells]] = 0.0
    return similarity.mean(dim=0).softmax(dim=0)


def rank_row(keys: torch.Tensor, importance: torch.Tensor, share: float) -> torch.Tensor:
    """keys [n, D] and importance [n] >= 0, oldest first -> ranks [n] fp32 in [0, 2]; share: the paper's lambda."""
    if keys.shape[0] == 0:
        return importance.new_zeros(0)
    importance = importance / importance.sum().clamp(min=torch.finfo(torch.float32).tiny)
    return share * importance - (1.0 - share) * redundancy(keys) + SHIFT
