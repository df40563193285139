"""A conversation's memory in the middle of its life: permuted pages and blocks, NaN in everything unused."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from plugins.blocks import encode
from plugins.commit.params import Decision, PublishParams, RowTable
from plugins.layout import BlockFormat, BlockLayout
from plugins.memory import KvMemory

PAGE_TOKENS = 8


@dataclass(frozen=True)
class CommitCase:
    """entries: most old entries of a row; spread: how far keys scatter around a few centres (near ones get absorbed).

    runs: staged tokens fill whole pages in order, as they do in an engine; else they are scattered.
    free_blocks: blocks nobody owns; protected: share of old entries whose score is inf; equal: all scores alike.
    """

    name: str
    staged: int = 30
    entries: int = 60
    layers: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    block_entries: int = 16
    format: BlockFormat = "fp32"
    spread: float = 0.3
    protected: float = 0.0
    equal: bool = False
    centres: int = 12
    page_tokens: int = PAGE_TOKENS
    kv_dtype: torch.dtype = torch.float32
    runs: bool = False


@dataclass(frozen=True)
class CommitState:
    memory: KvMemory
    staged: torch.Tensor
    table: RowTable
    free_blocks: torch.Tensor
    free_slots: torch.Tensor


CASES = (
    CommitCase("first_commit", entries=0),
    CommitCase("later_commit"),
    CommitCase("nothing_staged", staged=0),
    CommitCase("nothing_at_all", staged=0, entries=0),
    CommitCase("one_token", staged=1, entries=0),
    CommitCase("far_apart", spread=3.0),
    CommitCase("near", spread=0.05),
    CommitCase("protected", protected=0.2),
    CommitCase("ties", equal=True),
    CommitCase("int4", format="int4"),
    CommitCase("k8v4", format="k8v4", protected=0.1),
    CommitCase("int8", format="int8", spread=0.1),
    CommitCase("bf16", format="bf16"),
    CommitCase("fp16", format="fp16", protected=0.1),
)


def make_state(case: CommitCase, seed: int = 0) -> CommitState:
    gen = torch.Generator().manual_seed(seed)
    rows, size = case.layers * case.kv_heads, case.block_entries
    page_tokens = case.page_tokens
    num_slots = (math.ceil(case.staged / page_tokens) + 3) * page_tokens
    slots = torch.randperm(num_slots, generator=gen)
    if case.runs:
        pages_in_order = torch.randperm(num_slots // page_tokens, generator=gen)
        slots = (pages_in_order[:, None] * page_tokens + torch.arange(page_tokens)).flatten()
    staged = slots[: case.staged]
    centres = torch.randn(rows, case.centres, case.head_dim, generator=gen)
    shape = (num_slots // page_tokens, case.kv_heads, 2, page_tokens, case.head_dim)
    pages = [torch.full(shape, torch.nan, dtype=case.kv_dtype) for _ in range(case.layers)]
    seen = [torch.full((shape[0], case.kv_heads, page_tokens), torch.nan).half() for _ in range(case.layers)]
    for row in range(rows):
        layer, head = divmod(row, case.kv_heads)
        for slot in slots[: case.staged + 10].tolist():
            kv = torch.randn(2, case.head_dim, generator=gen)
            kv[0] = kv[0] * case.spread + centres[row, int(torch.randint(case.centres, (), generator=gen))]
            pages[layer][slot // page_tokens, head, :, slot % page_tokens] = kv
            seen[layer][slot // page_tokens, head, slot % page_tokens] = _scores(case, 1, gen)[0]
    layout = BlockLayout(case.format, size, case.head_dim)
    counts = [int(torch.randint(0, case.entries + 1, (), generator=gen)) for _ in range(rows)]
    lens = [[size] * (n // size) + ([n % size] if n % size else []) for n in counts]
    flat = [n for row_lens in lens for n in row_lens]
    num_blocks = len(flat) + rows * (math.ceil((case.staged + case.entries) / size) + 2)
    ids = torch.randperm(num_blocks, generator=gen)
    blocks = torch.full((num_blocks, layout.block_bytes), 255, dtype=torch.uint8)
    score = torch.full((num_blocks, size), torch.nan).half()
    for block, row, count in zip(ids, [r for r in range(rows) for _ in lens[r]], flat, strict=False):
        keys, values = torch.randn(2, 1, size, case.head_dim, generator=gen)
        keys = keys * case.spread + centres[row, torch.randint(case.centres, (size,), generator=gen)]
        bias = torch.rand(1, size, generator=gen)
        blocks[block] = encode(keys, values, bias, torch.tensor([count]), layout)[0]
        score[block, :count] = _scores(case, count, gen)
    starts = tuple(sum(len(x) for x in lens[:r]) for r in range(rows + 1))
    table = RowTable(starts, ids[: len(flat)], torch.tensor(flat, dtype=torch.int64))
    memory = KvMemory(tuple(pages), tuple(seen), blocks, score, layout)
    return CommitState(memory, staged, table, ids[len(flat) :], slots[case.staged :])


def _scores(case: CommitCase, count: int, gen: torch.Generator) -> torch.Tensor:
    if case.equal:
        return torch.full((count,), 0.25).half()
    scores = torch.rand(count, generator=gen).pow(4)
    scores[torch.rand(count, generator=gen) < 0.1] = 0.0
    scores[torch.rand(count, generator=gen) < case.protected] = torch.inf
    return scores.half()


def plan_publish(
    state: CommitState, decision: Decision, gate: float | None, dissolve_under: float = 0.6
) -> PublishParams:
    """What a manager would plan: dissolve sparse blocks, then per row the blocks that stay and the new ones."""
    old, size = state.table, state.memory.layout.block_entries
    dissolve = decision.alive.sum(dim=1) < dissolve_under * size
    free = iter(state.free_blocks.tolist())
    starts, ids, lens, is_new = [0], [], [], []
    for row in range(state.memory.num_rows):
        written = int(decision.staged_keep[row].sum())
        for b in range(old.starts[row], old.starts[row + 1]):
            if dissolve[b]:
                written += int(decision.alive[b].sum())
            else:
                ids.append(int(old.ids[b]))
                lens.append(int(old.lens[b]))
                is_new.append(False)
        for first in range(0, written, size):
            ids.append(next(free))
            lens.append(min(size, written - first))
            is_new.append(True)
        starts.append(len(ids))
    new = RowTable(tuple(starts), torch.tensor(ids, dtype=torch.int64), torch.tensor(lens, dtype=torch.int64))
    return PublishParams(state.staged, old, dissolve, new, torch.tensor(is_new, dtype=torch.bool), gate)
