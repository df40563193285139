"""The native CPU `attend` against the float64 reference: every type, format and instruction level this machine has."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins import blocks as block_codec
from plugins.attend import native, reference
from plugins.attend.params import RECORD_SQUARES, AttendParams, AttendTables
from plugins.layout import BlockLayout
from tests.plugins.native_forms import SANITIZERS, run_sanitized

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "c++", "clang++")), reason="needs a C++ compiler"
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 1e-5, "bf16": 2.0**-8, "fp16": 2.0**-10}  # of each value: the type's own rounding is half of it
Attend = Callable[[AttendParams], None]


@dataclass(frozen=True)
class Case:
    """One batch: per sequence (query rows, page tokens, entries per KV head). record_skip repeats over sequences."""

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
    mark: int = 1
    record_skip: tuple[int, ...] = (0,)
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
    block_lens = [
        runs(max(0, n - h), case.block_entries, g) for _, _, n in case.sequences for h in range(case.kv_heads)
    ]
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
    skips = [case.record_skip[i % len(case.record_skip)] for i in range(len(rows))]
    tables = AttendTables(
        row_starts=starts(rows), page_starts=starts([len(x) for x in page_lens]), page_ids=page_ids.int(),
        page_lens=torch.tensor(flat_pages, dtype=torch.int32), block_starts=starts([len(x) for x in block_lens]),
        block_ids=block_ids.int(), block_lens=torch.tensor(flat_blocks, dtype=torch.int32),
        record=(case.mark * record).to(torch.uint8), record_skip=torch.tensor(skips, dtype=torch.int32),
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
    fields = [(layout.k_codes, layout.k_row_bytes), (layout.v_codes, layout.v_row_bytes), (layout.bias, 2)]
    fields += [(layout.v_scale, 2), (layout.v_min, 2)] if layout.quantized else []
    for offset, size in fields:
        raw[offset + length * size : offset + layout.block_entries * size] = 0xFF
    return raw


def copied(params: AttendParams) -> AttendParams:
    return dataclasses.replace(
        params, out=torch.full_like(params.out, torch.nan), seen=params.seen.clone(), score=params.score.clone()
    )


def check(attends: dict[str, Attend], case: Case) -> None:
    """Every level's out, seen, score against the reference; blocks and pages must not change."""
    params = make_params(case)
    want = reference.attend(params)
    pages, blocks = params.pages.clone(), params.blocks.clone()
    for level, attend in attends.items():
        got = copied(params)
        attend(got)
        compare(got, want, (level, case))
    assert torch.equal(pages.view(torch.uint8), params.pages.view(torch.uint8)) and torch.equal(blocks, params.blocks)


def compare(got: AttendParams, want: tuple[torch.Tensor, torch.Tensor, torch.Tensor], what: tuple[str, Case]) -> None:
    case = what[1]
    error = (got.out.double() - want[0]).abs()
    assert not got.out.isnan().any(), what
    floor = 1e-4 if case.q == "bf16" else 1e-5  # AMX splits what is not exact in bf16 in two halves
    assert not (error > TOLERANCE[case.q] * want[0].abs() + floor).any(), (error.max(), what)
    for name, have, wanted in (("seen", got.seen, want[1]), ("score", got.score, want[2])):
        slack = 1e-3 * wanted.abs() + 1e-5
        assert torch.equal(have.isnan(), wanted.isnan()), (name, what)
        assert not ((have.double() - wanted).abs() > slack).any(), (name, what)


@pytest.fixture(scope="module")
def attends() -> dict[str, Attend]:
    """One form per instruction level of this processor, with two threads."""
    made = {level: native.make_attend(2, level) for level in native.levels()}
    assert all(made.values()) and "portable" in made
    return {level: attend for level, attend in made.items() if attend is not None}


BATCH = ((1, 45, 40), (5, 33, 20), (1, 0, 9), (2, 2, 0))
SHAPES = [(1, 64), (2, 128), (3, 64), (5, 80), (8, 72), (16, 64), (4, 256), (2, 8)]


@pytest.mark.parametrize("format_", ["int4", "k8v4", "int8", "bf16", "fp16", "fp32"])
@pytest.mark.parametrize("types", [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp32")])
def test_types_and_formats(attends: dict[str, Attend], types: tuple[str, str], format_: str) -> None:
    check(attends, Case(BATCH, q=types[0], kv=types[1], format=format_))


@pytest.mark.parametrize(("group", "head_dim"), SHAPES)
def test_groups_and_head_dims(attends: dict[str, Attend], group: int, head_dim: int) -> None:
    for types, format_ in (("fp32", "int4"), ("bf16", "int8"), ("bf16", "k8v4")):
        check(attends, Case(BATCH, group=group, head_dim=head_dim, q=types, kv=types, format=format_, record="some"))


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_few_bf16_query_vectors(attends: dict[str, Attend], group: int, head_dim: int) -> None:
    """Every number of query vectors that decoding takes together, over pages and blocks of odd lengths."""
    batch = ((1, 45, 41), (1, 33, 0), (1, 0, 7))
    for format_ in ("int8", "k8v4", "int4", "bf16"):
        case = Case(batch, kv_heads=1, group=group, head_dim=head_dim, q="bf16", kv="bf16", format=format_)
        check(attends, dataclasses.replace(case, page_tokens=8, seed=group))
        check(attends, dataclasses.replace(case, block_entries=64))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 11, 33, 70])
def test_rows_over_history(attends: dict[str, Attend], rows: int) -> None:
    """A chunk over pages and blocks, and one longer than its pages (its first rows read blocks only, or nothing)."""
    for types in ("fp32", "bf16"):
        batch = ((rows, rows + 17, 21), (rows, max(0, rows - 3), 5), (rows, rows // 2, 0))
        for format_ in ("int4", "k8v4"):
            check(attends, Case(batch, kv_heads=1, q=types, kv=types, format=format_, record="some"))


def test_long_contexts_are_split(attends: dict[str, Attend]) -> None:
    """Several splits of 512 tokens, in blocks and in pages, decode and a few rows, recorded and not."""
    for record, mark in (("all", 1), ("all", RECORD_SQUARES), ("none", 1)):
        check(attends, Case(((1, 1300, 700), (3, 900, 0)), kv_heads=1, q="bf16", kv="bf16", record=record, mark=mark))


def test_many_rows_are_tiled(attends: dict[str, Attend]) -> None:
    """More query vectors than one item takes; the group of 200 exceeds it with a single row."""
    for mark in (1, RECORD_SQUARES):
        check(attends, Case(((30, 30, 20),), kv_heads=1, group=16, q="bf16", kv="bf16", record="some", mark=mark))
        check(attends, Case(((2, 9, 8),), kv_heads=1, group=200, head_dim=32, record="some", mark=mark))


@pytest.mark.parametrize("skip", [(1,), (20, 0, 7), (128, 600), (10**6,)])
def test_newest_tokens_are_not_recorded(attends: dict[str, Attend], skip: tuple[int, ...]) -> None:
    """Decode, split lists, few rows and many, on every path."""
    for types in ("fp32", "bf16"):
        batch = ((1, 45, 40), (5, 33, 20), (33, 40, 5), (2, 2, 0), (1, 1300, 10), (70, 90, 0))
        check(attends, Case(batch, kv_heads=1, q=types, kv=types, record="some", record_skip=skip))


@pytest.mark.parametrize("format_", ["fp32", "k8v4", "int8"])
def test_extreme_logits(attends: dict[str, Attend], format_: str) -> None:
    """Logits of +-1e4: one token takes all, fp32 itself resolves them to 1e-3 only."""
    for attend in attends.values():
        params = make_params(Case(((1, 40, 30), (9, 30, 10)), spread=3e3, format=format_))
        got = copied(params)
        attend(got)
        want = reference.attend(params)[0]
        assert (got.out.double() - want).abs().max().item() < 0.02


@pytest.mark.parametrize("format_", ["int8", "k8v4", "int4"])
def test_blocks_that_hardly_count(attends: dict[str, Attend], format_: str) -> None:
    """Weights of e^-80, times scales, are too small for what they are coded in."""
    params = make_params(Case(((1, 40, 30),), q="bf16", kv="bf16", format=format_))
    layout = params.block_layout
    params.blocks[:, layout.bias : layout.bias + 2 * layout.block_entries].view(torch.float16).fill_(-80.0)
    want = reference.attend(params)[0]
    for attend in attends.values():
        got = copied(params)
        attend(got)
        assert (got.out.double() - want).abs().max().item() < 0.02


def test_squares_add_up_over_steps(attends: dict[str, Attend]) -> None:
    """Scores of all rows at once are the norm of those of every row, from zero."""
    case = Case(((6, 40, 30),), kv_heads=1, group=1, mark=RECORD_SQUARES)
    for attend in attends.values():
        params = copied(make_params(case))
        params.seen.zero_(), params.score.zero_()
        parts = []
        for row in range(6):
            params.tables.record.zero_()
            params.tables.record[row] = RECORD_SQUARES
            alone = dataclasses.replace(params, seen=params.seen.clone(), score=params.score.clone())
            attend(alone)
            parts.append(torch.cat([alone.seen.flatten(), alone.score.flatten()]).float())
        params.tables.record.fill_(RECORD_SQUARES)
        attend(params)
        whole = torch.cat([params.seen.flatten(), params.score.flatten()]).float()
        torch.testing.assert_close(whole, torch.stack(parts).norm(dim=0), atol=1e-3, rtol=2e-3)
        assert whole.max() > 1.2 * torch.stack(parts).amax(dim=0).max()


def test_nothing_to_read(attends: dict[str, Attend]) -> None:
    for attend in attends.values():
        params = make_params(Case(((1, 0, 0), (0, 5, 3), (12, 0, 0), (1, 3, 2))))
        attend(params)
        assert torch.equal(params.out[:13], torch.zeros_like(params.out[:13]))
        assert params.out[13].abs().min() > 0
        empty = make_params(Case(()))
        attend(empty)


@pytest.mark.parametrize(("share_openmp", "mark"), [(False, 1), (True, 1), (False, RECORD_SQUARES)])
def test_bits_do_not_depend_on_threads(share_openmp: bool, mark: int) -> None:
    batch = ((1, 2100, 800), (40, 500, 300), (300, 500, 40), (1, 30, 0))
    case = Case(batch, q="bf16", kv="bf16", format="int4", record="some", mark=mark)
    params = make_params(case)
    results = []
    for level in native.levels():
        for threads in (1, 2, 3, 5):
            attend = native.make_attend(threads, level, share_openmp=share_openmp)
            assert attend is not None
            got = copied(params)
            attend(got)
            results.append((level, [x.view(torch.int16) for x in (got.out, got.seen, got.score)]))
        first = next(tensors for name, tensors in results if name == level)
        for name, tensors in results:
            assert name != level or all(map(torch.equal, first, tensors))


def test_callers_on_several_threads(attends: dict[str, Attend]) -> None:
    """Calls at the same time (ctypes releases the interpreter lock) do not disturb each other."""
    attend = list(attends.values())[-1]
    params = make_params(Case(((1, 2100, 300), (7, 64, 60)), q="bf16", kv="bf16"))
    want = copied(params)
    attend(want)
    with ThreadPoolExecutor(4) as pool:
        copies = [copied(params) for _ in range(16)]
        list(pool.map(attend, copies))
    assert all(torch.equal(got.out, want.out) and torch.equal(got.seen[got.seen >= 0], want.seen[want.seen >= 0])
               for got in copies)  # fmt: skip


def test_a_level_the_processor_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of portable"):
        native.make_attend(1, "neon")  # type: ignore[arg-type]


CASES = st.builds(
    Case,
    sequences=st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 70), st.integers(0, 50)), min_size=1, max_size=3
    ).map(tuple),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 5),
    head_dim=st.sampled_from([8, 16, 32, 40, 64, 96, 128]),
    q=st.sampled_from(sorted(DTYPES)),
    kv=st.sampled_from(sorted(DTYPES)),
    format=st.sampled_from(["int4", "k8v4", "int8", "bf16", "fp16", "fp32"]),
    page_tokens=st.sampled_from([8, 16, 32, 256]),
    block_entries=st.sampled_from([16, 24, 64, 256]),
    record=st.sampled_from(["all", "none", "some"]),
    mark=st.sampled_from([1, RECORD_SQUARES]),
    record_skip=st.lists(st.integers(0, 90), min_size=1, max_size=3).map(tuple),
    seed=st.integers(0, 2**16),
)


@settings(max_examples=50, deadline=None)
@given(case=CASES)
def test_fuzz(attends: dict[str, Attend], case: Case) -> None:
    check(attends, case)


def test_under_sanitizers() -> None:
    """AddressSanitizer and UBSan over all levels: no access beyond a tensor or the scratch, no undefined arithmetic."""
    library = native.library(SANITIZERS, ("portable", native.levels()[-1]))  # the best level holds the others' code too
    run_sanitized(dataclasses.replace(library, name="attend_sanitized"), "attend_sanitized.py")
