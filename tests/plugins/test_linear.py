"""Products with weights, in torch and native form, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plugins import native_levels
from plugins.linear import native
from plugins.linear.cpu import TorchLinear
from plugins.linear.params import LinearForm
from tests.plugins.native_forms import SANITIZERS, load, run_sanitized

LIBRARY = load(native.library())
HAS_NATIVE = LIBRARY is not None and bool(native_levels.levels_of(LIBRARY, "commitkv_linear"))
needs_native = pytest.mark.skipif(not HAS_NATIVE, reason="needs a C++ compiler and a processor with AMX")


def make_native(threads: int = 2) -> native.NativeLinear:
    assert LIBRARY is not None
    return native.NativeLinear(LIBRARY, None, threads)


FORMS: dict[str, LinearForm] = {"torch": TorchLinear()} | ({"native": make_native()} if HAS_NATIVE else {})
STEP = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


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
        # torch's product rounds to bf16 on the way, and so does the native form where it has no kernel.
        native_kernel = form == "native" and hidden % 32 == 0 and vocab >= 16
        step = 1e-5 if dtype == torch.float32 or native_kernel else STEP[dtype]
        close(got, x.double() @ table.double().T, step)


@needs_native
def test_a_row_does_not_depend_on_others_nor_on_threads() -> None:
    weight, table = numbers(576, 576, dtype=torch.bfloat16) * 0.05, numbers(999, 576, dtype=torch.bfloat16)
    x = numbers(75, 576, dtype=torch.bfloat16)
    alone = make_native(1)
    linear, logits = alone.linear(weight, None)(x), alone.logits(table)(x)
    for threads in (1, 2, 5):
        form = make_native(threads)
        for rows in (slice(0, 1), slice(3, 20), slice(40, 75)):
            assert torch.equal(form.linear(weight, None)(x[rows]), linear[rows])
            assert torch.equal(form.logits(table)(x[rows]), logits[rows])


@needs_native
def test_under_sanitizers() -> None:
    run_sanitized(replace(native.library(SANITIZERS), name="linear_sanitized"), "native_sanitized.py", "linear")
