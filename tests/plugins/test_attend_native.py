"""The native CPU `attend` against the float64 reference: every type, format and instruction level this machine has."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins import blocks as block_codec
from plugins.attend import native, reference
from plugins.attend.params import AttendParams, AttendTables
from plugins.layout import BlockLayout

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "c++", "clang++")), reason="needs a C++ compiler"
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 1e-5, "bf16": 4e-3, "fp16": 1e-3}  # bf16's own rounding of `out` is 2^-9
Attend = Callable[[AttendParams], None]


@dataclass(frozen=True)
class Case:
    """One batch: per sequence (query rows, page tokens, entries per KV head)."""

    sequences: tuple[tuple[int, int, int], ...]
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    q: str = "fp32"
    kv: str = "fp32"
    format: str = "int8"
    page_tokens: int = 16
    block_entries: int = 16
    record: str = "all"
    spread: float = 1.0
    seed: int = 0


def runs(total: int, most: int, generator: torch.Generator) -> list[int]:
    """Lengths 0..most that add up to total, not all full."""
    lens: list[int] = []
    while total > 0:
        full = bool(torch.randint(0, 3, (1,), generator=generator))
        length = most if full else int(torch.randint(0, most + 1, (1,), generator=generator))
        lens.append(min(length, total))
        total -= lens[-1]
    return lens


def starts(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


def make_params(case: Case) -> AttendParams:
    """Random arenas with permuted tables; everything outside the tables' lengths is NaN or 0xff."""
    g = torch.Generator().manual_seed(case.seed)
    page_lens = [runs(tokens, case.page_tokens, g) for _, tokens, _ in case.sequences]
    block_lens = [runs(max(0, n - h), case.block_entries, g) for _, _, n in case.sequences for h in range(case.kv_heads)]
    num_pages, num_blocks = sum(map(len, page_lens)) + 2, sum(map(len, block_lens)) + 2
    flat_pages, flat_blocks = [n for x in page_lens for n in x], [n for x in block_lens for n in x]
    page_ids, block_ids = (torch.randperm(n, generator=g)[: n - 2] for n in (num_pages, num_blocks))
    pages = torch.full((num_pages, case.kv_heads, 2, case.page_tokens, case.head_dim), torch.nan, dtype=DTYPES[case.kv])
    seen = torch.full((num_pages, case.kv_heads, case.page_tokens), torch.nan, dtype=torch.float16)
    for page, length in zip(page_ids.tolist(), flat_pages, strict=True):
        pages[page, :, :, :length] = torch.randn((case.kv_heads, 2, length, case.head_dim), generator=g).to(pages.dtype)
        seen[page, :, :length] = (torch.rand((case.kv_heads, length), generator=g) * 0.02).half()
    layout = BlockLayout(case.format, case.block_entries, case.head_dim)  # type: ignore[arg-type]
    blocks = torch.full((num_blocks, layout.block_bytes), 0xFF, dtype=torch.uint8)
    score = torch.full((num_blocks, case.block_entries), torch.nan, dtype=torch.float16)
    for block, length in zip(block_ids.tolist(), flat_blocks, strict=True):
        blocks[block] = make_block(layout, length, g)
        score[block, :length] = (torch.rand((length,), generator=g) * 0.02).half()
    rows = [n for n, _, _ in case.sequences]
    q = torch.randn((sum(rows), case.kv_heads * case.group, case.head_dim), generator=g) * case.spread
    record = {"all": torch.ones(sum(rows)), "none": torch.zeros(sum(rows))}.get(case.record)
    if record is None:
        record = torch.randint(0, 2, (sum(rows),), generator=g)
    tables = AttendTables(
        row_starts=starts(rows), page_starts=starts([len(x) for x in page_lens]), page_ids=page_ids.int(),
        page_lens=torch.tensor(flat_pages, dtype=torch.int32), block_starts=starts([len(x) for x in block_lens]),
        block_ids=block_ids.int(), block_lens=torch.tensor(flat_blocks, dtype=torch.int32), record=record.to(torch.uint8),
    )  # fmt: skip
    q = q.to(DTYPES[case.q])
    out = torch.full_like(q, torch.nan)
    return AttendParams(q, out, pages, seen, blocks, score, layout, tables, case.head_dim**-0.5)


def make_block(layout: BlockLayout, length: int, g: torch.Generator) -> torch.Tensor:
    """One block with `length` random entries; the bytes of the others are 0xff (NaN in every float format)."""
    shape = (1, layout.block_entries, layout.head_dim)
    keys, values = torch.randn(shape, generator=g), torch.randn(shape, generator=g)
    bias = torch.rand(shape[:2], generator=g) * 3
    raw = block_codec.encode(keys, values, bias, torch.tensor([length]), layout)[0]
    fields = [(layout.k_codes, layout.row_bytes), (layout.v_codes, layout.row_bytes), (layout.bias, 2)]
    fields += [(layout.v_scale, 2), (layout.v_min, 2)] if layout.quantized else []
    for offset, size in fields:
        raw[offset + length * size : offset + layout.block_entries * size] = 0xFF
    return raw


def copied(params: AttendParams) -> AttendParams:
    return dataclasses.replace(
        params, out=torch.full_like(params.out, torch.nan), seen=params.seen.clone(), score=params.score.clone()
    )


def check(attend: Attend, case: Case) -> None:
    """Runs `attend` and compares out, seen, score with the reference; blocks and pages must not change."""
    params = make_params(case)
    want, want_seen, want_score = reference.attend(params)
    got = copied(params)
    pages, blocks = params.pages.clone(), params.blocks.clone()
    attend(got)
    tolerance = TOLERANCE[case.q] * max(1.0, case.spread)
    worst = (got.out.double() - want).abs().max().item() if want.numel() else 0.0
    assert worst <= tolerance * max(1.0, want.abs().max().item()), (worst, case)
    for name, have, wanted in (("seen", got.seen, want_seen), ("score", got.score, want_score)):
        slack = 1e-3 * wanted.abs() + 1e-5 * max(1.0, case.spread)
        assert torch.equal(have.isnan(), wanted.isnan()), (name, case)
        assert not ((have.double() - wanted).abs() > slack).any(), (name, case)
    assert torch.equal(pages.view(torch.uint8), params.pages.view(torch.uint8)) and torch.equal(blocks, params.blocks)


@pytest.fixture(scope="module")
def attends() -> dict[str, Attend]:
    """One form per instruction level of this processor, with two threads."""
    made = {level: native.make_attend(2, level) for level in native.levels()}
    assert all(made.values()) and "portable" in made
    return {level: attend for level, attend in made.items() if attend is not None}


BATCH = ((1, 45, 40), (5, 33, 20), (1, 0, 9), (2, 2, 0))
SHAPES = [(1, 64), (2, 128), (3, 64), (5, 80), (8, 72), (16, 64), (4, 256), (2, 8)]


@pytest.mark.parametrize("format_", ["int4", "int8", "bf16", "fp16", "fp32"])
@pytest.mark.parametrize("types", [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp32")])
def test_types_and_formats(attends: dict[str, Attend], types: tuple[str, str], format_: str) -> None:
    for attend in attends.values():
        check(attend, Case(BATCH, q=types[0], kv=types[1], format=format_))


@pytest.mark.parametrize(("group", "head_dim"), SHAPES)
def test_groups_and_head_dims(attends: dict[str, Attend], group: int, head_dim: int) -> None:
    for attend in attends.values():
        for types, format_ in (("fp32", "int4"), ("bf16", "int8")):
            check(attend, Case(BATCH, group=group, head_dim=head_dim, q=types, kv=types, format=format_, record="some"))
