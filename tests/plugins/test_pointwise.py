"""Row operations in torch and native form against plain float64 formulas."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from plugins.pointwise import native
from plugins.pointwise.cpu import TorchPointwise
from plugins.pointwise.params import Pointwise
from tests.plugins.native_forms import SANITIZERS, forms_of, load, run_sanitized

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}  # relative: the dtype's own step
DTYPES = tuple(TOLERANCE)
SHAPES = ((1, 576), (3, 64), (16, 40), (7, 9), (300, 576))
EPS = 1e-5
ENTRY = "commitkv_rms_norm"


@pytest.fixture(scope="module")
def forms() -> dict[str, Pointwise]:
    return {"torch": TorchPointwise(), **forms_of(load(native.library()), ENTRY, native.NativePointwise)}


def close(got: torch.Tensor, want: torch.Tensor, roundings: int = 1) -> None:
    tolerance = TOLERANCE[got.dtype] * roundings
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * 1e-2)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight.double()


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_and_sum(forms: dict[str, Pointwise], shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, delta, weight = numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype, seed=1), numbers(shape[1], seed=2)
    before = x.clone(), delta.clone()
    for form in forms.values():
        close(form.rms_norm(x, weight, EPS), normed(x, weight))
        total, out = form.add_norm(x, delta, weight, EPS)
        assert torch.equal(total, x + delta)
        close(out, normed(total, weight))
        assert torch.equal(x, before[0]) and torch.equal(delta, before[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_of_heads_inside_wider_rows(forms: dict[str, Pointwise], dtype: torch.dtype) -> None:
    qkv, weight = numbers(5, 11, 24, dtype=dtype), numbers(24, seed=2)
    for form in forms.values():
        for heads in (qkv[:, :6], qkv[:, 6:9]):
            close(form.rms_norm(heads, weight, EPS), normed(heads, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated_silu(forms: dict[str, Pointwise], shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, size = shape
    gate_up = numbers(rows, 2 * size, dtype=dtype)
    gate_up[0, :8] = torch.tensor([0.0, 1e4, -1e4, 80.0, -80.0, 100.0, -100.0, -0.0])
    gate, up = gate_up.double().chunk(2, dim=1)
    for name, form in forms.items():
        close(form.gated_silu(gate_up), gate * torch.sigmoid(gate) * up, roundings=2 if name == "torch" else 1)


def test_not_a_number_stays_one(forms: dict[str, Pointwise]) -> None:
    x, weight = torch.ones(2, 32), torch.ones(32)
    x[1, 5] = torch.nan
    for form in forms.values():
        out = form.rms_norm(x, weight, EPS)
        assert bool(out[0].isfinite().all()) and bool(out[1].isnan().all())
        gated = form.gated_silu(x)
        assert gated.isnan().sum() == 1 and bool(gated[1, 5].isnan())


def test_bits_do_not_depend_on_threads_or_batch() -> None:
    lib = load(native.library())
    if lib is None:
        pytest.skip("needs a C++ compiler")
    x, weight = numbers(400, 512, dtype=torch.bfloat16), numbers(512)
    alone = native.NativePointwise(lib, None, 1)
    for threads in (2, 5):
        form = native.NativePointwise(lib, None, threads)
        assert torch.equal(form.rms_norm(x, weight, EPS), alone.rms_norm(x, weight, EPS))
        assert torch.equal(form.gated_silu(x), alone.gated_silu(x))
    assert torch.equal(alone.rms_norm(x[7:8], weight, EPS), alone.rms_norm(x, weight, EPS)[7:8])


def test_under_sanitizers() -> None:
    library = native.library(SANITIZERS)
    run_sanitized(dataclasses.replace(library, name="pointwise_sanitized"), "native_sanitized.py", "pointwise")
