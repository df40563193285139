"""Random `AttendParams` of many shapes, with everything that must not be read filled with NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.attend.params import AttendParams, AttendTables
from plugins.blocks import encode
from plugins.layout import BlockFormat, BlockLayout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class AttendCase:
    """rows, tokens (page tokens, the rows included) and entries per head range, one item per sequence.

    marks: what recording rows carry in `record`, sequences in turn.
    """

    name: str
    rows: tuple[int, ...] = (1,)
    tokens: tuple[int, ...] = (21,)
    max_entries: int = 40
    kv_heads: int = 2
    group_size: int = 3
    head_dim: int = 16
    page_tokens: int = 8
    block_entries: int = 16
    dtype: str = "fp32"
    kv_dtype: str = "fp32"
    format: BlockFormat = "int4"
    record: str = "all"
    marks: tuple[int, ...] = (1,)
    record_skip: int = 0
    logit_scale: float = 1.0
    holes: bool = False


CASES = (
    AttendCase("decode"),
    AttendCase("decode_batch", rows=(1, 1, 1), tokens=(5, 33, 1)),
    AttendCase("one_token", tokens=(1,), max_entries=0),
    AttendCase("no_committed", tokens=(40,), max_entries=0),
    AttendCase("no_active", tokens=(0,)),
    AttendCase("nothing_at_all", tokens=(0,), max_entries=0),
    AttendCase("page_exactly_full", tokens=(16,)),
    AttendCase("partial_inner_pages", rows=(1, 5), tokens=(20, 31), holes=True),
    AttendCase("chunk", rows=(13,), tokens=(13,)),
    AttendCase("chunk_over_history", rows=(17, 1, 6), tokens=(40, 12, 6), record="some"),
    AttendCase("record_none", rows=(4, 1), tokens=(9, 9), record="none"),
    AttendCase("skip_small", rows=(17, 1, 6), tokens=(40, 12, 6), record="some", record_skip=3),
    AttendCase("skip_with_holes", rows=(1, 5), tokens=(20, 31), holes=True, record_skip=9),
    AttendCase("skip_all", rows=(13, 1), tokens=(13, 40), record_skip=1000),
    AttendCase("int8", rows=(3, 1), tokens=(12, 20), format="int8"),
    AttendCase("k8v4", rows=(3, 1), tokens=(12, 20), format="k8v4", record_skip=4),
    AttendCase("fp32_blocks", rows=(3, 1), tokens=(12, 20), format="fp32"),
    AttendCase("bf16", rows=(3, 1), tokens=(12, 20), dtype="bf16", kv_dtype="bf16", format="bf16"),
    AttendCase("fp16", rows=(3, 1), tokens=(12, 20), dtype="fp16", kv_dtype="fp16", format="fp16"),
    AttendCase("bf16_over_int4", rows=(5, 1), tokens=(17, 8), dtype="bf16", kv_dtype="bf16"),
    AttendCase("bf16_over_k8v4", rows=(5, 1), tokens=(17, 8), dtype="bf16", kv_dtype="bf16", format="k8v4"),
    AttendCase("fp32_over_bf16_pages", kv_dtype="bf16", format="int8"),
    AttendCase("extreme_logits", rows=(5, 1), tokens=(17, 8), format="fp32", logit_scale=1e4),
    AttendCase("extreme_logits_int4", rows=(5, 1), tokens=(17, 8), logit_scale=1e4),
    AttendCase("smollm2_heads", rows=(1, 1), tokens=(70, 33), kv_heads=3, head_dim=64, page_tokens=16,
               block_entries=64, max_entries=200, dtype="bf16", kv_dtype="bf16"),
    AttendCase("wide_heads", kv_heads=1, group_size=8, head_dim=128, page_tokens=16, block_entries=64, format="int8"),
    AttendCase("no_group", group_size=1, head_dim=80),
)  # fmt: skip


def make_attend_case(case: AttendCase, seed: int = 0) -> AttendParams:
    """Pages and blocks in permuted order, three spare ones of each, NaN wherever no token or entry lies."""
    gen = torch.Generator().manual_seed(seed)
    pages, seen, page_tables = _make_pages(case, gen)
    layout = BlockLayout(case.format, case.block_entries, case.head_dim)
    blocks, score, block_tables = _make_blocks(case, layout, gen)
    num_rows = sum(case.rows)
    q = torch.randn(num_rows, case.kv_heads * case.group_size, case.head_dim, generator=gen) * case.logit_scale
    record = {"all": torch.ones(num_rows), "none": torch.zeros(num_rows), "some": torch.arange(num_rows) % 3 == 1}
    skip = torch.full((len(case.rows),), case.record_skip, dtype=torch.int32)
    marks = [case.marks[i % len(case.marks)] for i in range(len(case.rows))]
    record_rows = (record[case.record] * torch.tensor(marks).repeat_interleave(torch.tensor(case.rows))).to(torch.uint8)
    tables = AttendTables(_starts(list(case.rows)), *page_tables, *block_tables, record_rows, skip)
    q = q.to(DTYPES[case.dtype])
    return AttendParams(
        q, torch.full_like(q, torch.nan), pages, seen, blocks, score, layout, tables, case.head_dim**-0.5
    )


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _starts(counts: list[int]) -> torch.Tensor:
    return int32([sum(counts[:i]) for i in range(len(counts) + 1)])


def _page_lens(case: AttendCase, tokens: int, gen: torch.Generator) -> list[int]:
    lens = []
    while tokens > 0:
        most = min(tokens, case.page_tokens)
        lens.append(int(torch.randint(1, most + 1, (), generator=gen)) if case.holes else most)
        tokens -= lens[-1]
    return lens


def _make_pages(
    case: AttendCase, gen: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    lens = [_page_lens(case, tokens, gen) for tokens in case.tokens]
    flat = [n for sequence in lens for n in sequence]
    num_pages = len(flat) + 3
    ids = torch.randperm(num_pages, generator=gen)[: len(flat)].tolist()
    shape = (num_pages, case.kv_heads, 2, case.page_tokens, case.head_dim)
    pages = torch.full(shape, torch.nan)
    seen = torch.full((num_pages, case.kv_heads, case.page_tokens), torch.nan, dtype=torch.float16)
    for page, count in zip(ids, flat, strict=True):
        pages[page, :, :, :count] = torch.randn(case.kv_heads, 2, count, case.head_dim, generator=gen)
        seen[page, :, :count] = torch.rand(case.kv_heads, count, generator=gen).half() * 0.1
    starts = _starts([len(sequence) for sequence in lens])
    return pages.to(DTYPES[case.kv_dtype]), seen, (starts, int32(ids), int32(flat))


def _make_blocks(
    case: AttendCase, layout: BlockLayout, gen: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    size, counts, lens = case.block_entries, [], []
    for part in range(len(case.rows) * case.kv_heads):
        entries = int(torch.randint(0, case.max_entries + 1, (), generator=gen)) if part else case.max_entries
        filled = [size] * (entries // size) + ([entries % size] if entries % size else [])
        counts.append(len(filled))
        lens += filled
    num_blocks = len(lens) + 3
    ids = torch.randperm(num_blocks, generator=gen)[: len(lens)]
    blocks = torch.full((num_blocks, layout.block_bytes), 255, dtype=torch.uint8)
    score = torch.full((num_blocks, size), torch.nan, dtype=torch.float16)
    if lens:
        kv = torch.randn(2, len(lens), size, case.head_dim, generator=gen)
        bias = torch.randn(len(lens), size, generator=gen)
        blocks[ids] = encode(kv[0], kv[1], bias, int32(lens), layout)
        for block, count in zip(ids.tolist(), lens, strict=True):
            score[block, :count] = torch.rand(count, generator=gen).half() * 0.1
            poison_unfilled(blocks[block : block + 1], count, layout)
        score[ids[0], 0] = torch.inf
    return blocks, score, (_starts(counts), int32(ids.tolist()), int32(lens))


def poison_unfilled(raw: torch.Tensor, count: int, layout: BlockLayout) -> None:
    """All-ones bytes (NaN in every float format) wherever entries `count` and later lie. raw [1, block_bytes]."""
    size = layout.block_entries
    runs = [(layout.k_codes, layout.k_row_bytes), (layout.v_codes, layout.v_row_bytes), (layout.bias, 2)]
    if layout.quantized:
        runs += [(layout.v_scale, 2), (layout.v_min, 2)]
    for offset, width in runs:
        raw[:, offset + count * width : offset + size * width] = 255
