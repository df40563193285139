"""Storage for the kernels to work on, on a GPU or for their emulation: shuffled pages and blocks, random contents.

One layer. Also the float64 answers that kernels are held to at these sizes; `plugins/<op>/reference.py` are loops for
small cases, these are products of whole matrices, one (conversation, KV head) at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from perf.kernel_shapes import HALF_BYTES, CommitShape, KernelShape
from plugins.attend.params import LayerBlocks, StepTables
from plugins.blocks import read_bias, read_keys, read_values
from plugins.commit.params import Decision, PublishParams, RowTable
from plugins.layout import BlockLayout
from plugins.memory import KvMemory

RECORD_SKIP = 128
SEED = 0


@dataclass(frozen=True, eq=False)
class AttendCase:
    """q [rows, q_heads, D];   tables: host tensors, as an attend form takes them."""

    shape: KernelShape
    memory: KvMemory
    tables: StepTables
    q: torch.Tensor

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.q.shape[-1])


def make_attend_case(shape: KernelShape, dtype: torch.dtype, device: torch.device, record: bool = True) -> AttendCase:
    """record: whether all rows raise scores, as decode rows do in the engine, or none."""
    gen = torch.Generator(device).manual_seed(SEED)
    heads = shape.heads
    num_pages, num_blocks = shape.batch * shape.num_pages, shape.batch * heads.kv_heads * shape.num_blocks
    page_shape = (max(1, num_pages), heads.kv_heads, 2, shape.page_tokens, heads.head_dim)
    pages = torch.empty(page_shape, dtype=dtype, device=device).normal_(generator=gen)
    seen = torch.zeros(page_shape[0], heads.kv_heads, shape.page_tokens, dtype=torch.float16, device=device)
    blocks = random_blocks(shape.block, max(1, num_blocks), device, gen)
    score = torch.zeros(max(1, num_blocks), shape.block_entries, dtype=torch.float16, device=device)
    q = torch.empty(shape.batch * shape.rows, heads.kv_heads * heads.group_size, heads.head_dim, device=device)
    memory = KvMemory((pages,), (seen,), blocks, score, shape.block)
    return AttendCase(shape, memory, make_tables(shape, record), q.normal_(generator=gen).to(dtype))


def random_blocks(layout: BlockLayout, count: int, device: torch.device, gen: torch.Generator) -> torch.Tensor:
    """[count, block_bytes] uint8 of entries about as large as normal ones, with biases of a few tokens' mass."""
    raw = torch.randint(0, 256, (count, layout.block_bytes), dtype=torch.uint8, device=device, generator=gen)
    entries, channels = layout.block_entries, layout.head_dim
    if layout.quantized:
        for offset, number, bits in (
            (layout.k_scale, channels, layout.k_bits),
            (layout.v_scale, entries, layout.v_bits),
        ):
            raw[:, offset : offset + HALF_BYTES * number].view(torch.float16).fill_(4.0 / ((1 << bits) - 1))
        for offset, number in ((layout.k_min, channels), (layout.v_min, entries)):
            raw[:, offset : offset + HALF_BYTES * number].view(torch.float16).fill_(-2.0)
    else:
        dtype = torch.float16 if layout.format == "fp16" else torch.bfloat16
        for offset in (layout.k_codes, layout.v_codes):
            raw[:, offset : offset + entries * layout.k_row_bytes].view(dtype).normal_(generator=gen)
    bias = raw[:, layout.bias : layout.bias + HALF_BYTES * entries].view(torch.float16)
    bias.uniform_(0.0, 1.0, generator=gen)
    return raw


def make_tables(shape: KernelShape, record: bool) -> StepTables:
    """Every conversation alike, pages and blocks in random order."""
    gen = torch.Generator().manual_seed(SEED)
    lists = shape.batch * shape.heads.kv_heads
    lens = torch.full((shape.num_pages,), shape.page_tokens, dtype=torch.int32)
    if shape.num_pages:
        lens[-1] = shape.active_tokens - (shape.num_pages - 1) * shape.page_tokens
    blocks = LayerBlocks(
        starts=_starts(lists, shape.num_blocks)[None],
        ids=torch.randperm(lists * shape.num_blocks, generator=gen, dtype=torch.int32),
        lens=torch.full((lists * shape.num_blocks,), shape.block_entries, dtype=torch.int32),
        first=(0,),
    )
    return StepTables(
        row_starts=_starts(shape.batch, shape.rows),
        page_starts=_starts(shape.batch, shape.num_pages),
        page_ids=torch.randperm(shape.batch * shape.num_pages, generator=gen, dtype=torch.int32),
        page_lens=lens.repeat(shape.batch),
        record=torch.full((shape.batch * shape.rows,), record, dtype=torch.uint8),
        record_skip=torch.full((shape.batch,), RECORD_SKIP, dtype=torch.int32),
        blocks=blocks,
    )


def _starts(count: int, each: int) -> torch.Tensor:
    return torch.arange(count + 1, dtype=torch.int32) * each


def exact_decode(case: AttendCase, conversations: list[int]) -> torch.Tensor:
    """out [len(conversations), q_heads, D] float64 of a decode step, on the memory's device."""
    assert case.shape.rows == 1
    heads = range(case.shape.heads.kv_heads)
    return torch.stack([torch.cat([_exact_head(case, s, g) for g in heads]) for s in conversations])


def _exact_head(case: AttendCase, sequence: int, head: int) -> torch.Tensor:
    """out [group, D] of one conversation and KV head."""
    memory, tables, shape = case.memory, case.tables, case.shape
    device, group = memory.blocks.device, shape.heads.group_size
    listed = slice(sequence * shape.num_pages, (sequence + 1) * shape.num_pages)
    kv = memory.pages[0][tables.page_ids[listed].long().to(device), head].double()
    keys, values = (kv[:, i].reshape(-1, shape.heads.head_dim)[: shape.active_tokens] for i in range(2))
    bias = keys.new_zeros(keys.shape[0])
    first = (sequence * shape.heads.kv_heads + head) * shape.num_blocks
    ids = tables.blocks.ids[first : first + shape.num_blocks].long().to(device)
    if ids.numel():
        raw = memory.blocks[ids]
        more = [read(raw, memory.layout).double() for read in (read_keys, read_values, read_bias)]
        keys, values = torch.cat((keys, more[0].flatten(0, 1))), torch.cat((values, more[1].flatten(0, 1)))
        bias = torch.cat((bias, more[2].flatten()))
    q = case.q[sequence, head * group : (head + 1) * group].double()
    return torch.softmax(q @ keys.T * case.scale + bias, dim=1) @ values


@dataclass(frozen=True, eq=False)
class CommitCase:
    """One publish: nothing was committed before, `kept` of the staged tokens stay in every head."""

    shape: CommitShape
    memory: KvMemory
    params: PublishParams
    decision: Decision


def make_commit_case(shape: CommitShape, dtype: torch.dtype, device: torch.device) -> CommitCase:
    """Staged tokens fill shuffled pages; every head keeps a random part of them; keys are far apart."""
    gen = torch.Generator().manual_seed(SEED)
    heads = shape.heads
    num_pages = -(-shape.staged // shape.page_tokens)
    page_shape = (num_pages, heads.kv_heads, 2, shape.page_tokens, heads.head_dim)
    pages = torch.randn(page_shape, generator=gen).to(device, dtype)
    seen = torch.rand(num_pages, heads.kv_heads, shape.page_tokens, generator=gen).half().to(device)
    num_blocks = heads.kv_heads * shape.num_blocks
    blocks = torch.zeros(num_blocks, shape.block.block_bytes, dtype=torch.uint8, device=device)
    score = torch.zeros(num_blocks, shape.block_entries, dtype=torch.float16, device=device)
    order = torch.randperm(num_pages, generator=gen)
    offsets = torch.arange(shape.page_tokens)
    staged = (order[:, None] * shape.page_tokens + offsets).flatten()[: shape.staged].to(device)
    keep = torch.rand(heads.kv_heads, shape.staged, generator=gen).argsort(dim=1) < shape.kept
    none = torch.zeros(0, dtype=torch.int64, device=device)
    old = RowTable((0,) * (heads.kv_heads + 1), none, none)
    lens = torch.full((shape.num_blocks,), shape.block_entries)
    lens[-1] = shape.kept - (shape.num_blocks - 1) * shape.block_entries
    starts = tuple(range(0, num_blocks + 1, shape.num_blocks))
    new = RowTable(starts, torch.randperm(num_blocks, generator=gen).to(device), lens.repeat(heads.kv_heads).to(device))
    params = PublishParams(
        staged, old, none.bool(), new, torch.ones(num_blocks, dtype=torch.bool, device=device), shape.gate,
        move_from=none, move_to=none,
    )  # fmt: skip
    scores = torch.rand(heads.kv_heads, shape.staged, generator=gen).to(device)
    alive = torch.zeros(0, shape.block_entries, dtype=torch.bool, device=device)
    return CommitCase(
        shape, KvMemory((pages,), (seen,), blocks, score, shape.block), params,
        Decision(0.0, keep.to(device), scores, alive),
    )  # fmt: skip
