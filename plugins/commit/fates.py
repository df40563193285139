"""What a commit makes of every entry, for those who want to look: read before `publish` writes anything.

Entries of a row are numbered as everywhere: the filled ones of the old blocks in table order, then the staged tokens.
"""

from __future__ import annotations

import torch

from plugins import blocks as block_bytes
from plugins.commit.absorb import nearest_kept
from plugins.commit.params import Decision, PublishParams
from plugins.memory import KvMemory

GONE = -1


def commit_fates(memory: KvMemory, params: PublishParams, decision: Decision) -> list[torch.Tensor]:
    """Per row [entries] int64: the number of the entry that each one is part of afterwards, GONE for dropped ones.

    An entry that stays, evictable ones in blocks that stay included, is part of itself. What a span of several super
    tokens took in counts as part of the first of them.
    """
    kv_heads, page_tokens = memory.pages[0].shape[1], memory.pages[0].shape[3]
    page = torch.div(params.staged, page_tokens, rounding_mode="floor")
    offset = params.staged - page * page_tokens
    fates = []
    for row in range(memory.num_rows):
        layer, head = divmod(row, kv_heads)
        staged_keys = memory.pages[layer][page, head, 0, offset].float()
        fates.append(_row_fates(memory, params, decision, row, staged_keys))
    return fates


def _row_fates(
    memory: KvMemory, params: PublishParams, decision: Decision, row: int, staged_keys: torch.Tensor
) -> torch.Tensor:
    old = slice(params.old.starts[row], params.old.starts[row + 1])
    filled = torch.arange(memory.layout.block_entries, device=params.old.lens.device) < params.old.lens[old][:, None]
    stays = (~params.dissolve[old])[:, None].expand_as(filled)[filled]
    above = torch.cat((decision.alive[old][filled], decision.staged_keep[row]))
    moves = torch.cat((~stays, torch.ones_like(decision.staged_keep[row])))
    fates = torch.arange(above.shape[0], device=above.device)
    below = moves & ~above
    if decision.exact is not None:
        below[above.shape[0] - decision.staged_keep.shape[1] + decision.exact[row]] = False
    if decision.pooling is not None:
        groups = _groups(decision, row, old, filled)
        pooled = below & (groups >= 0)
        leaders = {int(groups[i]): i for i in (above & (groups >= 0)).nonzero()[:, 0].flip(0).tolist()}
        for i in pooled.nonzero()[:, 0].tolist():
            fates[i] = leaders[int(groups[i])]
        below = below & ~pooled
    if params.absorb_gate is None or not bool(below.any()):
        fates[below] = GONE
        return fates
    old_keys = block_bytes.read_keys(memory.blocks.index_select(0, params.old.ids[old]), memory.layout)[filled]
    keys = torch.cat((old_keys, staged_keys))
    score = torch.cat((memory.score[params.old.ids[old]].float()[filled], decision.staged_score[row]))
    kept = above.nonzero()[:, 0]
    # New entries first, then those of blocks that stay: ties go as `publish` lets them.
    kept = torch.cat((kept[moves[kept]], kept[~moves[kept]]))
    nearest, near = nearest_kept(keys[below], keys[kept], score[kept].isfinite(), params.absorb_gate)
    gone = torch.full_like(nearest, GONE)
    fates[below] = torch.where(near, kept[nearest], gone) if kept.shape[0] else gone
    return fates


def _groups(decision: Decision, row: int, old: slice, filled: torch.Tensor) -> torch.Tensor:
    assert decision.staged_group is not None
    ungrouped = torch.full((int(filled.sum()),), GONE, dtype=torch.int64, device=filled.device)
    of_old = ungrouped if decision.old_group is None else decision.old_group[old][filled]
    return torch.cat((of_old, decision.staged_group[row]))
