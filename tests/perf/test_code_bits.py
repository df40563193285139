"""Rounding of `perf.code_bits`; the questions need a real model and are its command's business."""

from __future__ import annotations

import pytest
import torch

from perf.code_bits import CODES, SPAN, Code, bits_of, rounded, rounded_keys, rounded_values
from runtime.rotation import hadamard


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rounding_is_within_half_a_step(bits: int) -> None:
    x = torch.randn(3, 100, 64, generator=torch.Generator().manual_seed(bits))
    step = (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / (2**bits - 1)
    error = (rounded(x, bits, -1) - x).abs()
    assert (error <= 0.5 * step + 0.01 * step * 2**bits).all() and error.max() > 0.2 * step.min()


def test_a_constant_stretch_stays() -> None:
    x = torch.full((2, 5, 8), 1.5)
    assert torch.equal(rounded(x, 2, -1), x)


def test_keys_have_a_scale_per_span_and_channel_values_one_per_token() -> None:
    """A channel of another size costs other channels of K nothing, and those of V much."""
    x = torch.randn(1, 2 * SPAN, 64, generator=torch.Generator().manual_seed(0))
    x[:, :SPAN, 3] *= 1000
    others = [channel for channel in range(64) if channel != 3]

    def error(y: torch.Tensor) -> torch.Tensor:
        return (y - x).abs()[..., others]

    assert error(rounded_keys(x, 4, None)).max() < 0.4
    assert error(rounded_values(x, 4, None))[:, :SPAN].mean() > 0.4 > error(rounded_values(x, 4, None))[:, SPAN:].max()
    assert error(rounded_values(x, 4, hadamard(64)))[:, :SPAN].mean() > 0.4  # spread, not gone


def test_a_rotation_helps_rows_with_one_large_channel() -> None:
    x = torch.randn(1, SPAN, 64, generator=torch.Generator().manual_seed(1))
    x[..., 5] = 20.0
    plain, rotated = (rounded_values(x, 4, rotation) for rotation in (None, hadamard(64)))
    assert (rotated - x).square().mean() < 0.5 * (plain - x).square().mean()


def test_bits_count_scales() -> None:
    assert bits_of(Code(8, 4), 64) == pytest.approx((8 + 0.5 + 4 + 0.5) / 2)
    assert len({code.name for code in CODES}) == len(CODES)
