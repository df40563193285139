"""Absorption: what falls below the line goes into the nearest kept entry of its row, if that key is near.

The kept key stays exact; values and masses merge. A set with weights p (sum 1), values v_j and biases b_j becomes
    v = sum p_j v_j      bias = sum p_j (b_j - ln p_j)
which is exact in mass to first order (design: log-sum-exp minus a Kullback-Leibler term, a lower bound).
"""

from __future__ import annotations

import torch

from plugins.commit.entries import TINY_WEIGHT, Entries

TILE_DISTANCES = 1 << 21


def nearest_kept(
    keys: torch.Tensor, kept: torch.Tensor, allowed: torch.Tensor, gate: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """keys [n, D] below the line, kept [m, D] of which allowed [m] bool may absorb, all fp32.

    Returns nearest [n] int64 into kept, and near [n] bool: |k - k'| < gate * |k|.
    """
    if kept.shape[0] == 0 or keys.shape[0] == 0:
        shape = keys.shape[:1]
        return keys.new_zeros(shape, dtype=torch.int64), keys.new_zeros(shape, dtype=torch.bool)
    square = torch.where(allowed, kept.square().sum(dim=1), torch.inf)
    rows = max(1, TILE_DISTANCES // kept.shape[0])
    nearest = torch.cat(
        [torch.addmm(square, tile, kept.T, alpha=-2.0).argmin(dim=1) for tile in torch.split(keys, rows)]
    )
    distance = (keys - kept[nearest]).norm(dim=1)
    return nearest, (distance < gate * keys.norm(dim=1)) & allowed[nearest]


def merge(into: Entries, absorbed: Entries, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [m, D] and biases [m] of `into` after entry target[j] of it took in entry j of `absorbed`."""
    # Protected entries (inf) are no targets, so their own share must come out as 1.
    own, other = (e.score.clamp(TINY_WEIGHT, torch.finfo(torch.float16).max) for e in (into, absorbed))
    total = own.index_add(0, target, other)
    own, other = own / total, other / total[target]
    values = (own[:, None] * into.values).index_add_(0, target, other[:, None] * absorbed.values)
    bias = own * (into.bias - own.log())
    return values, bias.index_add_(0, target, other * (absorbed.bias - other.log()))
