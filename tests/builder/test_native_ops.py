"""The native form's composition, run by torch, against the float64 references: in float64, then in fp32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builder.block_reader import BlockReader
from builder.layers import TorchLayers
from builder.native_ops import NOTHING, Arenas, Attended, NativeOps, Raised
from builder.network_ops import rotate
from plugins.append import reference as append_reference
from plugins.append.params import AppendParams
from plugins.attend import reference
from plugins.attend.params import AttendParams
from plugins.blocks import encode, read_bias, read_keys, read_values
from plugins.layout import BlockFormat, BlockLayout
from tests.builder.native_cases import (
    LAYER,
    NUM_LAYERS,
    Padding,
    geometry_of,
    pad_rows,
    padded,
    some_slots,
    tables_of,
    words_of,
)
from tests.plugins.attend_cases import CASES, DTYPES, AttendCase, int32, make_attend_case

GPU_CASES = [case for case in CASES if case.format != "fp32"]
PADDINGS = {"plain": Padding(), "padded": Padding(rows=3, sequences=2, pages=4, blocks=5)}


def compose(params: AttendParams, padding: Padding, real: torch.dtype) -> tuple[NativeOps[torch.Tensor], Arenas]:
    layers = TorchLayers(real, params.pages.dtype, real)
    tables = tables_of(params, some_slots(params.q.shape[0] - padding.rows), padding)
    ops = NativeOps(layers, geometry_of(params), tables)
    return ops, Arenas(params.pages, params.seen, words_of(params.blocks))


def raised(ops: NativeOps[torch.Tensor], params: AttendParams, got: Raised[torch.Tensor]) -> list[torch.Tensor]:
    """seen and score; the other layers raise nothing."""
    weights = [got.entry_weights if layer == LAYER else got.entry_weights * 0 for layer in range(NUM_LAYERS)]
    return [got.seen, ops.raise_score(params.score, weights)]


def attend(
    case: AttendCase, padding: Padding, real: torch.dtype
) -> tuple[AttendParams, Attended[torch.Tensor], list[torch.Tensor]]:
    """The case, what attention gives for its rows, and the raised seen and score."""
    plain = make_attend_case(case)
    params = pad_rows(plain, padding)
    ops, arenas = compose(params, padding, real)
    got = ops.attend(LAYER, params.q.to(real), arenas)
    rows = plain.q.shape[0]
    assert got.out.shape[0] == rows + padding.rows
    assert torch.equal(got.out[rows:], torch.zeros_like(got.out[rows:])), "a row that pads sees nothing"
    assert bool((got.lse[rows:] < 0.99 * NOTHING).all())
    return plain, replace(got, out=got.out[:rows], lse=got.lse[:rows]), raised(ops, params, got.raised)


def check_raised(got: torch.Tensor, expected: torch.Tensor, rtol: float) -> None:
    """fp16 against float64; NaN stays where it was."""
    torch.testing.assert_close(got.double(), expected, rtol=rtol + 2**-11, atol=6e-8 + rtol * 1e-2, equal_nan=True)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda c: c.name)
def test_attend_in_float64(case: AttendCase, padding: str) -> None:
    params, got, (got_seen, got_score) = attend(case, PADDINGS[padding], torch.float64)
    out, seen, score = reference.attend(params)
    # Scales and limits of masks are fp32 numbers of the arenas, so only the last bits of float64 differ.
    torch.testing.assert_close(got.out, out, rtol=1e-6, atol=1e-6)
    check_raised(got_seen, seen, 1e-6)
    check_raised(got_score, score, 1e-6)


@pytest.mark.parametrize("case", GPU_CASES, ids=lambda c: c.name)
def test_attend_in_fp32(case: AttendCase) -> None:
    params, got, (got_seen, got_score) = attend(case, PADDINGS["padded"], torch.float32)
    out, seen, score = reference.attend(params)
    # A logit of 1e4 has an error of 1e-3 in fp32.
    bound = 2e-2 if case.logit_scale > 1 else 2e-5
    torch.testing.assert_close(got.out.double(), out, rtol=bound, atol=bound)
    check_raised(got_seen, seen, bound)
    check_raised(got_score, score, bound)


@pytest.mark.parametrize("case", GPU_CASES, ids=lambda c: c.name)
def test_score_with_the_known_lse(case: AttendCase) -> None:
    """A second pass raises what the first did, and is given keys alone: NaN in all values changes nothing."""
    params, first, _ = attend(case, Padding(), torch.float64)
    pages = params.pages.clone()
    pages[:, :, 1] = torch.nan
    ops, arenas = compose(params, Padding(), torch.float64)
    seen, score = raised(ops, params, ops.score(LAYER, params.q.double(), first.lse, replace(arenas, pages=pages)))
    _, expected_seen, expected_score = reference.attend(params)
    check_raised(seen, expected_seen, 1e-6)
    check_raised(score, expected_score, 1e-6)


def test_inputs_stay_as_they_were() -> None:
    params = make_attend_case(GPU_CASES[0])
    ops, arenas = compose(params, Padding(), torch.float32)
    before = [x.clone() for x in (params.pages, params.seen, params.blocks, params.score)]
    raised(ops, params, ops.attend(LAYER, params.q, arenas).raised)
    after = (params.pages, params.seen, params.blocks, params.score)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, after, strict=True))


def test_a_wrong_mask_would_show() -> None:
    """One page token more or less than a row may see is far outside the bounds above."""
    case = next(c for c in CASES if c.name == "chunk_over_history")
    params = make_attend_case(case)
    lens = params.tables.page_lens.clone()
    lens[0] -= 1
    expected, _, _ = reference.attend(replace(params, tables=replace(params.tables, page_lens=lens)))
    _, got, _ = attend(case, Padding(), torch.float64)
    assert float((got.out - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("kv_dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("rows", [1, 23])
@pytest.mark.parametrize("pads", [0, 4])
def test_append(rows: int, pads: int, kv_dtype: str) -> None:
    gen = torch.Generator().manual_seed(rows)
    shape = (rows + pads, 6, 64)
    angle = torch.rand(rows + pads, 32, generator=gen, dtype=torch.float64) * 50
    rotary = (angle.cos(), angle.sin())
    q, k, v = (torch.randn(shape, generator=gen, dtype=torch.float64)[:, :n] for n in (6, 2, 2))
    slots = torch.randperm(7 * 8, generator=gen)[:rows].to(torch.int32)
    if rows == 23:  # a row inside that pads, and one slot 0
        slots[5], slots[7] = -1, 0
        slots = torch.where((slots == 0) & (torch.arange(rows) != 7), 55, slots)
    pages = torch.full((7, 2, 2, 8, 64), torch.nan, dtype=DTYPES[kv_dtype])
    seen = torch.full((7, 2, 8), 0.5, dtype=torch.float16)
    params = replace(make_attend_case(AttendCase("append", head_dim=64, format="int4")), pages=pages, seen=seen)
    tables = replace(tables_of(params, slots, Padding()), slots=padded(slots, pads, -1))
    layers = TorchLayers(torch.float64, pages.dtype, torch.float64)
    ops = NativeOps(layers, geometry_of(params), tables)
    turned = [rotate(layers, x, rotary) for x in (q, k)]
    got_pages, got_seen = ops.append(turned[1], v, pages, seen)
    kept = slots >= 0
    real = [x[:rows][kept] for x in (q, k, v, *rotary)]
    expected = AppendParams(*real, slots[kept], pages.clone(), seen.clone())
    expected_q = append_reference.append(expected)
    torch.testing.assert_close(turned[0][:rows][kept], expected_q)
    torch.testing.assert_close(got_pages, expected.pages, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got_seen, expected.seen)


def test_append_where_everything_pads() -> None:
    params = make_attend_case(AttendCase("append", head_dim=64))
    tables = replace(tables_of(params, some_slots(1), Padding()), slots=int32([-1, -1]))
    ops = NativeOps(TorchLayers(torch.float32, params.pages.dtype), geometry_of(params), tables)
    k = torch.randn(2, 2, 64)
    pages, seen = ops.append(k, k, params.pages, params.seen)
    torch.testing.assert_close(pages, params.pages, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(seen, params.seen, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("block_format", ["int4", "k8v4", "int8", "fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_blocks_read_exactly(block_format: BlockFormat, head_dim: int) -> None:
    """Every code and every fp16 number arrives as `plugins.blocks` reads it; scales of both signs of a word."""
    layout = BlockLayout(block_format, 16, head_dim)
    gen = torch.Generator().manual_seed(5)
    keys, values = torch.randn(2, 9, 16, head_dim, generator=gen) * 40
    bias = torch.randn(9, 16, generator=gen)
    raw = encode(keys, values, bias, torch.full((9,), 16), layout)
    reader = BlockReader(TorchLayers(torch.float32, torch.float16), layout)
    words = words_of(raw)
    assert bool((words < 0).any()) and bool((words > 0).any())
    got = reader.read(words)
    for found, read in ((got.keys, read_keys), (got.values, read_values), (got.bias, read_bias)):
        torch.testing.assert_close(found, read(raw, layout), rtol=0, atol=0)


def test_garbage_blocks_read_as_finite_numbers() -> None:
    for block_format in ("int4", "int8", "bf16", "fp16"):
        layout = BlockLayout(block_format, 16, 64)  # type: ignore[arg-type]
        reader = BlockReader(TorchLayers(torch.float32, torch.float16), layout)
        words = torch.full((2, layout.block_bytes // 4), -1, dtype=torch.int32)
        got = reader.read(words)
        assert all(bool(x.isfinite().all()) for x in (got.keys, got.values, got.bias))
