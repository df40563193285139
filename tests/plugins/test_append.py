"""Torch `append` against the plain form in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plugins.append import cpu, reference
from plugins.append.params import AppendParams


def make_params(rows: int, dtype: torch.dtype, kv_dtype: torch.dtype, repeat: bool) -> AppendParams:
    gen = torch.Generator().manual_seed(rows)
    angle = torch.rand(rows, 8, generator=gen) * 50
    cos, sin = angle.cos(), angle.sin()
    if repeat:
        cos, sin = torch.cat((cos, cos), 1), torch.cat((sin, sin), 1)
    q, k, v = (torch.randn(rows, h, 16, generator=gen).to(dtype) for h in (6, 2, 2))
    slots = torch.randperm(7 * 8, generator=gen)[:rows].to(torch.int32)
    pages = torch.full((7, 2, 2, 8, 16), torch.nan, dtype=kv_dtype)
    seen = torch.full((7, 2, 8), 0.5, dtype=torch.float16)
    return AppendParams(q, k, v, cos, sin, slots, pages, seen)


@pytest.mark.parametrize("rows", [1, 2, 23])
@pytest.mark.parametrize("repeat", [False, True], ids=["half_table", "full_table"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_equals_reference(rows: int, repeat: bool, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    params = make_params(rows, dtype, kv_dtype, repeat)
    exact = AppendParams(
        *(t.double() for t in (params.q, params.k, params.v, params.cos, params.sin)),
        params.slots, params.pages.double(), params.seen.clone(),
    )  # fmt: skip
    expected_q = reference.append(exact)
    q = cpu.append(params)
    tolerance = 1e-5 if dtype == kv_dtype == torch.float32 else 2e-2
    torch.testing.assert_close(q.double(), expected_q, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(params.pages.double(), exact.pages, atol=tolerance, rtol=tolerance, equal_nan=True)
    assert torch.equal(params.seen, exact.seen)
    assert int((params.seen == 0).sum()) == 2 * rows


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    x, y = torch.randn(2, 1, 1, 16).unbind(0)
    theta = 100.0 ** (-torch.arange(8) / 8)

    def at(position: int, z: torch.Tensor) -> torch.Tensor:
        angle = (position * theta)[None]
        params = make_params(1, torch.float32, torch.float32, False)
        return cpu.append(replace(params, q=z, cos=angle.cos(), sin=angle.sin()))

    torch.testing.assert_close(at(7, x).norm(), x.norm())
    torch.testing.assert_close((at(9, x) * at(4, y)).sum(), (at(105, x) * at(100, y)).sum(), atol=1e-3, rtol=1e-3)
