"""The line's last step for policies with super tokens: what fell below is grouped instead of given up."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins import blocks as block_bytes
from plugins.commit.params import Decision, LineParams
from plugins.commit.pooling import NO_GROUP, group_old, group_staged
from plugins.memory import KvMemory


@dataclass(frozen=True, eq=False)
class Drawn:
    """The line, and what stays before anything is pooled.

    kept [rows, old columns + n] bool; staged [rows, n] and old [rows, old columns] fp32: scores, old ones negative
    where nothing lies.   places: row and column [num_blocks, E] of every old entry.
    """

    line: float | torch.Tensor
    kept: torch.Tensor
    staged: torch.Tensor
    old: torch.Tensor
    places: tuple[torch.Tensor, torch.Tensor]


def pooled_decision(memory: KvMemory, params: LineParams, drawn: Drawn) -> Decision:
    """Staged tokens below the line form groups; where scores are positions, old entries that aged a tier do too."""
    pooling = params.choices.pooling
    assert pooling is not None and params.positions is not None, "super tokens need positions"
    num_old = drawn.old.shape[1]
    kept_old, kept_staged = drawn.kept[:, :num_old].clone(), drawn.kept[:, num_old:]
    staged = group_staged(~kept_staged, params.num_tokens - 1 - params.positions, pooling)
    alive, old_group = kept_old[drawn.places], None
    if params.choices.score == "position" and num_old:
        bias = torch.zeros_like(drawn.old)
        bias[drawn.places] = block_bytes.read_bias(memory.blocks.index_select(0, params.table.ids), memory.layout)
        loose = kept_old & drawn.old.isfinite()
        grouping = group_old(loose, drawn.old, bias, pooling, params.num_tokens)
        grouped = grouping.group >= 0
        old_group = grouping.group[drawn.places]
        # Numbers of old groups come first; those of staged ones follow.
        shift = (grouping.group.amax() // len(pooling.tiers) + 1) * len(pooling.tiers)
        staged_group = torch.where(staged.group >= 0, staged.group + shift, NO_GROUP)
        alive = (kept_old & (~grouped | grouping.leader))[drawn.places]
    else:
        staged_group = staged.group
    keep = kept_staged | staged.leader
    return Decision(drawn.line, keep, drawn.staged, alive, pooling, staged_group, old_group, params.merger)
