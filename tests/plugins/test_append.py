"""`append` in torch and native form against the plain form in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plugins.append import cpu, native, reference
from plugins.append.params import AppendForm, AppendParams
from plugins.layout import BlockLayout
from plugins.memory import KvMemory
from tests.plugins.native_forms import SANITIZERS, forms_of, load, run_sanitized

FORMS: dict[str, AppendForm] = {
    "torch": cpu.TorchAppend(),
    **forms_of(load(native.library()), "commitkv_append", native.NativeAppend),
}


def run(form: AppendForm, params: AppendParams) -> torch.Tensor:
    """One layer of a step."""
    nothing = torch.zeros(0)
    layout = BlockLayout("int8", 16, params.pages.shape[4])
    memory = KvMemory((params.pages,), (params.seen,), nothing, nothing, layout)
    return form.begin(params.slots.long(), (params.cos, params.sin), memory)(0, params.q, params.k, params.v)


def make_params(rows: int, dtype: torch.dtype, kv_dtype: torch.dtype, repeat: bool, head_dim: int = 16) -> AppendParams:
    """q, k and v are views of one tensor, as a fused projection gives them."""
    gen = torch.Generator().manual_seed(rows)
    angle = torch.rand(rows, head_dim // 2, generator=gen) * 50
    cos, sin = angle.cos(), angle.sin()
    if repeat:
        cos, sin = torch.cat((cos, cos), 1), torch.cat((sin, sin), 1)
    q, k, v = torch.randn(rows, 10, head_dim, generator=gen).to(dtype).split((6, 2, 2), dim=1)
    slots = torch.randperm(7 * 8, generator=gen)[:rows].to(torch.int32)
    pages = torch.full((7, 2, 2, 8, head_dim), torch.nan, dtype=kv_dtype)
    seen = torch.full((7, 2, 8), 0.5, dtype=torch.float16)
    return AppendParams(q, k, v, cos, sin, slots, pages, seen)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "head_dim"), [(1, 64), (2, 16), (23, 40)])
@pytest.mark.parametrize("repeat", [False, True], ids=["half_table", "full_table"])
@pytest.mark.parametrize(
    "types",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_equals_reference(
    form: str, rows: int, head_dim: int, repeat: bool, types: tuple[torch.dtype, torch.dtype]
) -> None:
    dtype, kv_dtype = types
    params = make_params(rows, dtype, kv_dtype, repeat, head_dim)
    exact = AppendParams(
        *(t.double() for t in (params.q, params.k, params.v, params.cos, params.sin)),
        params.slots, params.pages.double(), params.seen.clone(),
    )  # fmt: skip
    expected_q = reference.append(exact)
    q = run(FORMS[form], params)
    assert q.is_contiguous()
    for got, want in ((q, expected_q), (params.pages, exact.pages)):
        step = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[got.dtype]
        torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=step, equal_nan=True)
    assert torch.equal(params.seen, exact.seen)
    assert int((params.seen == 0).sum()) == 2 * rows


def test_bits_do_not_depend_on_threads() -> None:
    lib = load(native.library())
    if lib is None:
        pytest.skip("needs a C++ compiler")
    results = []
    for threads in (1, 2, 5):
        params = make_params(56, torch.bfloat16, torch.bfloat16, False, 64)
        q = run(native.NativeAppend(lib, None, threads), params)
        results.append((q, params.pages.view(torch.int16), params.seen))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_under_sanitizers() -> None:
    library = replace(native.library(SANITIZERS), name="append_sanitized")
    run_sanitized(library, "native_sanitized.py", "append")


@pytest.mark.parametrize("form", FORMS)
def test_rotation_keeps_lengths_and_depends_on_distance_only(form: str) -> None:
    x, y = torch.randn(2, 1, 1, 16).unbind(0)
    theta = 100.0 ** (-torch.arange(8) / 8)

    def at(position: int, z: torch.Tensor) -> torch.Tensor:
        angle = (position * theta)[None]
        params = make_params(1, torch.float32, torch.float32, False)
        return run(FORMS[form], replace(params, q=z, cos=angle.cos(), sin=angle.sin()))

    torch.testing.assert_close(at(7, x).norm(), x.norm())
    torch.testing.assert_close((at(9, x) * at(4, y)).sum(), (at(105, x) * at(100, y)).sum(), atol=1e-3, rtol=1e-3)
