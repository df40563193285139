"""A small trained network that says with which weights a span merges into one super token.

For members j of a span, one network for each (layer, KV head):
    x_j = [k_j - mean k; v_j - mean v; ln s_j - mean ln s]        means over the span, s: score
    logit_j = b_j + a ln s_j + u . tanh(W x_j + c)                p = softmax over the span
With u = 0 and a = 1 that is "weighted"; with a = 0, "mean". b_j: log-mass. `perf.train_merge` learns a, u, W and c.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.commit.entries import TINY_WEIGHT, Entries


@dataclass(frozen=True, eq=False)
class RowMerger:
    """One row's network.   hidden [2 * D + 1, H] (W), offset [H] (c), out [H] (u) fp32; score: a, one fp32 number."""

    hidden: torch.Tensor
    offset: torch.Tensor
    out: torch.Tensor
    score: torch.Tensor


@dataclass(frozen=True, eq=False)
class MergeWeights:
    """hidden [rows, 2 * D + 1, H], offset, out [rows, H], score [rows] fp32. A row is layer * G + kv_head."""

    hidden: torch.Tensor
    offset: torch.Tensor
    out: torch.Tensor
    score: torch.Tensor

    def row(self, row: int) -> RowMerger:
        """The network of one row."""
        return RowMerger(self.hidden[row], self.offset[row], self.out[row], self.score[row])


def merge_weights(members: Entries, number: torch.Tensor, sets: int, merger: RowMerger) -> torch.Tensor:
    """Weights [m] fp32 in (0, 1], the largest of each set 1. number [m] int64: the set of each member."""
    log_score = members.score.clamp(TINY_WEIGHT, torch.finfo(torch.float16).max).log()
    features = torch.cat((members.keys, members.values, log_score[:, None]), dim=1)
    count = torch.bincount(number, minlength=sets).clamp(min=1).to(features.dtype)
    mean = features.new_zeros((sets, features.shape[1])).index_add_(0, number, features) / count[:, None]
    inner = torch.tanh((features - mean[number]) @ merger.hidden + merger.offset)
    logits = members.bias + merger.score * log_score + inner @ merger.out
    top = logits.new_zeros(sets).scatter_reduce_(0, number, logits, "amax", include_self=False)
    # A weight of 0 would have no logarithm.
    return (logits - top[number]).exp().clamp(min=TINY_WEIGHT)
