"""The best entries of every row stay as they are, in pages beside the blocks.

A slot of such a page holds another token in every layer and head: keys carry their position already, so attention does
not mind. Their scores lie in the pages too, and go on being raised. Every commit chooses anew: the entries that were
exact so far are staged again with the new tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from plugins.commit.params import Decision, PublishParams
from plugins.memory import KvMemory


def choose_exact(decision: Decision, count: int) -> Decision:
    """Takes the `count` best staged entries of each row out of those that go into blocks, whatever the line."""
    count = min(count, decision.staged_score.shape[1])
    if count == 0:
        return decision
    exact = decision.staged_score.topk(count, dim=1).indices.sort(dim=1).values
    return replace(decision, staged_keep=decision.staged_keep.scatter(1, exact, False), exact=exact)


def count_lost(decision: Decision, num_exact: int) -> torch.Tensor:
    """[1] int64: of the first `num_exact` staged entries of each row, how many stay nowhere, over all rows."""
    stays = decision.staged_keep
    if decision.exact is not None:
        stays = stays.scatter(1, decision.exact, True)
    return (~stays[:, :num_exact]).sum().view(1)


def copy_exact(memory: KvMemory, params: PublishParams, decision: Decision) -> None:
    """Copies K, V and scores of the exact entries to their new slots, which nobody reads yet."""
    if decision.exact is None:
        return
    kv_heads, page_tokens = memory.pages[0].shape[1], memory.pages[0].shape[3]
    head = torch.arange(kv_heads, device=decision.exact.device)[:, None]
    source = params.staged[decision.exact]  # [rows, m]
    to_page, to_offset = torch.div(params.exact_to, page_tokens, rounding_mode="floor"), params.exact_to % page_tokens
    for layer, (pages, seen) in enumerate(zip(memory.pages, memory.seen, strict=True)):
        slots = source[layer * kv_heads : (layer + 1) * kv_heads]
        page, offset = torch.div(slots, page_tokens, rounding_mode="floor"), slots % page_tokens
        pages[to_page, head, :, to_offset] = pages[page, head, :, offset]
        seen[to_page, head, to_offset] = seen[page, head, offset]
