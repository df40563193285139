"""Products with weights, in torch and native form, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plugins import native_levels
from plugins.linear import native
from plugins.linear.cpu import TorchLinear
from plugins.linear.params import Int8Weight, LinearForm
from tests.plugins.native_forms import SANITIZERS, load, run_sanitized

TILES, WIDE = load(native.library()), load(native.wide_library())
HAS_TILES = TILES is not None and bool(native_levels.levels_of(TILES, "commitkv_linear"))
WIDE_LEVELS = () if WIDE is None else native_levels.levels_of(WIDE, "commitkv_wide_linear")
needs_compiler = pytest.mark.skipif(WIDE is None, reason="needs a C++ compiler")


def make_wide(level: native_levels.Level, threads: int = 2) -> native.WideLinear:
    assert WIDE is not None
    return native.WideLinear(WIDE, level, threads)


def make_tiles(threads: int = 2) -> native.NativeLinear:
    assert TILES is not None
    return native.NativeLinear(TILES, threads, TorchLinear())


def make_forms(threads: int) -> dict[str, LinearForm]:
    forms: dict[str, LinearForm] = {level: make_wide(level, threads) for level in WIDE_LEVELS}
    return forms | ({"amx": make_tiles(threads)} if HAS_TILES else {})


FORMS: dict[str, LinearForm] = {"torch": TorchLinear(), **make_forms(2)}
STEP = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
# Levels that multiply INT8 weights with x as 16-bit integers, one unit for every GROUP inputs (cpu_int8.hpp).
INTEGER_LEVELS, GROUP = {"avx2", "avx512"}, 128


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor, step: float) -> None:
    torch.testing.assert_close(got.double(), want, rtol=step, atol=1e-4 if step > 1e-4 else 1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("shape", [(48, 64), (960, 576), (576, 1536), (80, 32), (24, 64), (64, 40)], ids=str)
def test_linear_equals_float64(form: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, bias = numbers(*shape, dtype=dtype, seed=1) * 0.05, numbers(shape[0], dtype=dtype, seed=2)
    for with_bias in (None, bias):
        product = FORMS[form].linear(weight, with_bias)
        for rows in (1, 2, 15, 16, 17, 31, 32, 33, 48, 100):
            x = numbers(rows, shape[1], dtype=dtype, seed=rows)
            want = x.double() @ weight.double().T + (0.0 if with_bias is None else bias.double())
            got = product(x)
            assert got.dtype == dtype and got.is_contiguous()
            close(got, want, STEP[dtype])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("vocab", "hidden"), [(97, 64), (16, 32), (1000, 576), (49, 96), (5, 64), (200, 40)])
def test_logits_equal_float64(form: str, dtype: torch.dtype, vocab: int, hidden: int) -> None:
    table = numbers(vocab, hidden, dtype=dtype) * 0.1
    product = FORMS[form].logits(table)
    for rows in (0, 1, 2, 16, 17, 40):
        x = numbers(rows, hidden, dtype=dtype, seed=rows)
        got = product(x)
        assert got.dtype == torch.float32 and got.shape == (rows, vocab)
        # torch's product rounds to bf16 on the way, and so do native forms where they have no kernel.
        native_kernel = form != "torch" and hidden % 32 == 0 and vocab >= 16
        step = 1e-5 if dtype == torch.float32 or native_kernel else STEP[dtype]
        close(got, x.double() @ table.double().T, step)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_weights_equal_their_codes(form: str, dtype: torch.dtype) -> None:
    weight = Int8Weight.of(numbers(96, 64, dtype=torch.float32, seed=1))
    exact = weight.codes.double() * weight.scale.double()[:, None]
    bias = numbers(96, dtype=dtype, seed=2)
    # Torch's form rounds the weight to x's dtype first.
    step = 2 * STEP[dtype]
    fp32_error = 2e-3 if form in INTEGER_LEVELS else 1e-4
    for rows in (1, 2, 3, 4, 5, 13, 50):
        x = numbers(rows, 64, dtype=dtype, seed=rows)
        got, want = FORMS[form].linear(weight, bias)(x), x.double() @ exact.T + bias.double()
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=step, atol=0.1 if dtype == torch.bfloat16 else fp32_error)
        logits = FORMS[form].logits(weight)(x)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.double(), want - bias.double(), rtol=step, atol=0.1)


def test_int8_codes_are_nearest_and_rows_stay_zero() -> None:
    weight = numbers(5, 32, dtype=torch.float32, seed=3)
    weight[2] = 0.0
    coded = Int8Weight.of(weight)
    assert coded.codes.abs().amax(dim=1).tolist() == [127, 127, 0, 127, 127]
    error = (coded.dequantized(torch.float32) - weight).abs()
    assert bool((error <= coded.scale[:, None] / 2 * (1 + 1e-5)).all())
    assert torch.equal(coded.rows(torch.tensor([4, 1]), torch.float32), coded.dequantized(torch.float32)[[4, 1]])


def relative_errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Of every row, against its norm."""
    return (got.double() - want).norm(dim=1) / want.norm(dim=1)


@pytest.mark.parametrize("level", WIDE_LEVELS)
@pytest.mark.parametrize("shape", [(80, 32), (48, 96), (304, 416), (960, 576), (64, 1536)], ids=str)
def test_int8_error_is_far_below_bf16(level: native_levels.Level, shape: tuple[int, int]) -> None:
    weight = Int8Weight.of(numbers(*shape, dtype=torch.float32, seed=1))
    exact = weight.codes.double() * weight.scale.double()[:, None]
    form = make_wide(level)
    for product in (form.linear(weight, None), form.logits(weight)):
        for rows in range(1, 18):
            x = numbers(rows, shape[1], dtype=torch.bfloat16, seed=rows).float()
            assert relative_errors(product(x), x.double() @ exact.T).max() < 2.0**-15
            # No bf16 values any more: magnitudes of many powers of two, the largest just below one, an outlier.
            x *= 0.999
            x[0] *= 2.0 ** torch.arange(shape[1]).remainder(20)
            x[rows // 2, 1::2] = torch.nextafter(torch.tensor(2.0), torch.tensor(0.0))
            x[rows - 1, 5] *= 1000
            assert relative_errors(product(x), x.double() @ exact.T).max() < 2.0**-12


@pytest.mark.parametrize("level", WIDE_LEVELS)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-20, 1e20, 1e30])
def test_int8_weights_take_any_magnitude(level: native_levels.Level, magnitude: float) -> None:
    weight = Int8Weight.of(numbers(32, 96, dtype=torch.float32))
    x = numbers(5, 96, dtype=torch.bfloat16, seed=1).float() * magnitude
    want = x.double() @ (weight.codes.double() * weight.scale.double()[:, None]).T
    for product in (make_wide(level).linear(weight, None), make_wide(level).logits(weight)):
        assert relative_errors(product(x), want).max() < 2.0**-12


@pytest.mark.parametrize("level", WIDE_LEVELS)
@pytest.mark.parametrize("inputs", [96, 576, 1536])
def test_an_outlier_spoils_no_other_group(level: native_levels.Level, inputs: int) -> None:
    x = numbers(6, inputs, dtype=torch.bfloat16)
    for group in range(-(-inputs // GROUP)):
        codes = numbers(64, inputs, dtype=torch.float32).clamp(-1, 1).mul(127).to(torch.int8)
        codes[:, group * GROUP : (group + 1) * GROUP] = 0
        weight = Int8Weight(codes, torch.full((64,), 0.01))
        spoilt = x.clone()
        spoilt[:, group * GROUP + 7] = 3e4
        for product in (make_wide(level).linear(weight, None), make_wide(level).logits(weight)):
            assert torch.equal(product(spoilt), product(x))


@pytest.mark.parametrize("level", WIDE_LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_zeros_and_rows_that_are_not_finite(level: native_levels.Level, dtype: torch.dtype) -> None:
    weight = Int8Weight.of(numbers(80, 416, dtype=torch.float32))
    bias = numbers(80, dtype=dtype, seed=1)
    form = make_wide(level)
    linear, logits = form.linear(weight, bias), form.logits(weight)
    x = numbers(9, 416, dtype=dtype, seed=2)
    x[1] = 0.0
    before = linear(x), logits(x)
    assert torch.equal(before[0][1], bias) and not before[1][1].any()
    bad = {2: (0, float("nan")), 4: (300, float("inf")), 5: (415, float("-inf")), 8: (200, float("nan"))}
    for row, (at, value) in bad.items():
        x[row, at] = value
    good = [row for row in range(9) if row not in bad]
    for product, old in ((linear, before[0]), (logits, before[1])):
        now = product(x)
        assert torch.equal(now[good], old[good])
        assert not now[list(bad)].isfinite().any()
        for row, (_, value) in bad.items():
            assert not product(x[row : row + 1]).isfinite().any()
            assert value == value or product(x[row : row + 1]).isnan().all()


@needs_compiler
@pytest.mark.parametrize("form", sorted(FORMS.keys() - {"torch"}))
@pytest.mark.parametrize("shape", [(576, 576), (80, 96), (112, 416)], ids=str)
def test_a_row_does_not_depend_on_others_nor_on_threads(form: str, shape: tuple[int, int]) -> None:
    weight, table = numbers(*shape, dtype=torch.bfloat16) * 0.05, numbers(999, shape[1], dtype=torch.bfloat16)
    x = numbers(75, shape[1], dtype=torch.bfloat16)
    slices = [slice(0, 1), slice(1, 3), slice(3, 20), slice(40, 75)]
    slices += [slice(rows, 2 * rows) for rows in range(3, 18)]
    for matrix, head in ((weight, table), (Int8Weight.of(weight), Int8Weight.of(table))):
        alone = make_forms(1)[form]
        linear, logits = alone.linear(matrix, None)(x), alone.logits(head)(x)
        for threads in (1, 2, 5):
            other = make_forms(threads)[form]
            product, head_product = other.linear(matrix, None), other.logits(head)
            for rows in slices:
                assert torch.equal(product(x[rows]), linear[rows])
                assert torch.equal(head_product(x[rows]), logits[rows])


@pytest.mark.skipif(not HAS_TILES, reason="needs a C++ compiler and a processor with AMX")
def test_tiles_under_sanitizers() -> None:
    run_sanitized(replace(native.library(SANITIZERS), name="linear_sanitized"), "native_sanitized.py", "linear")


@needs_compiler
def test_wide_under_sanitizers() -> None:
    library = replace(native.wide_library(SANITIZERS), name="linear_wide_sanitized")
    run_sanitized(library, "native_sanitized.py", "linear_wide")
