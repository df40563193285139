"""Quantizing, packing and reading committed blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins import blocks
from plugins.layout import CODE_BITS, QUANTIZED, BlockFormat, BlockLayout

FORMATS = tuple(CODE_BITS)


def random_entries(layout: BlockLayout, count: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(seed)
    shape = (count, layout.block_entries, layout.head_dim)
    keys = torch.randn(shape, generator=gen) * torch.rand(layout.head_dim, generator=gen) * 10
    values, bias = torch.randn(shape, generator=gen), torch.randn(shape[:2], generator=gen)
    lens = torch.randint(1, layout.block_entries + 1, (count,), generator=gen)
    lens[0] = layout.block_entries
    return keys, values, bias, lens


@pytest.mark.parametrize("format", FORMATS)
def test_round_trip_error_is_bounded(format: BlockFormat) -> None:
    layout = BlockLayout(format, 16, 24)
    keys, values, bias, lens = random_entries(layout, 9)
    raw = blocks.encode(keys, values, bias, lens, layout)
    assert raw.shape == (9, layout.block_bytes)
    for b, n in enumerate(lens.tolist()):
        sides = ((0, keys, blocks.read_keys, layout.k_bits), (1, values, blocks.read_values, layout.v_bits))
        for dim, x, back, bits in sides:
            x, y = x[b, :n], back(raw, layout)[b, :n]
            if layout.quantized:
                levels = (1 << bits) - 1
                step = (x.amax(dim, keepdim=True) - x.amin(dim, keepdim=True)) / levels
                bound = 0.502 * step + x.abs().amax(dim, keepdim=True) * 2.0**-10
            else:
                bound = x.abs() * {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 0.0}[format] + 1e-7
            assert ((x - y).abs() <= bound).all(), f"{format}: {((x - y).abs() / bound).max()}"
        torch.testing.assert_close(blocks.read_bias(raw, layout)[b, :n], bias[b, :n], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("format", QUANTIZED)
def test_requantizing_changes_nothing(format: BlockFormat) -> None:
    layout = BlockLayout(format, 16, 32)
    keys, values, bias, lens = random_entries(layout, 20, seed=3)
    lens[:] = 16
    once = blocks.encode(keys, values, bias, lens, layout)
    twice = blocks.encode(*(f(once, layout) for f in (blocks.read_keys, blocks.read_values, blocks.read_bias)), lens,
                          layout)  # fmt: skip
    assert torch.equal(once, twice)


@given(low=st.floats(-3e4, 3e4), width=st.floats(0, 3e4), bits=st.sampled_from([4, 8]))
@settings(max_examples=200, deadline=None)
def test_codes_survive_their_own_values(low: float, width: float, bits: int) -> None:
    scale, minimum = blocks.fp16_range(torch.tensor(low), torch.tensor(low + width), bits)
    assert scale.isfinite() and minimum.isfinite()
    levels = (1 << bits) - 1
    codes = torch.arange(levels + 1.0)
    again = blocks.to_codes(minimum.float() + scale.float() * codes, scale, minimum, bits)
    if scale > abs(minimum) * 2.0**-20:
        assert torch.equal(again, codes)
    x = torch.linspace(low, low + width, 50)
    error = (minimum.float() + scale.float() * blocks.to_codes(x, scale, minimum, bits) - x).abs().max()
    assert error <= 0.52 * width / levels + abs(low) * 2.0**-10 + levels * 6e-8


def test_packed_int4_puts_channel_i_low_and_i_plus_half_high() -> None:
    packed = blocks.pack_codes(torch.arange(8.0), 4)
    assert packed.tolist() == [0 | 4 << 4, 1 | 5 << 4, 2 | 6 << 4, 3 | 7 << 4]
    assert blocks.unpack_codes(packed, 4).tolist() == list(range(8))


@pytest.mark.parametrize(("entries", "head_dim"), [(16, 64), (64, 40), (24, 8)])
def test_k8v4_has_the_keys_of_int8_and_the_values_of_int4(entries: int, head_dim: int) -> None:
    mixed, int8, int4 = (BlockLayout(name, entries, head_dim) for name in ("k8v4", "int8", "int4"))
    assert mixed.v_codes == int8.v_codes and mixed.block_bytes - mixed.k_scale == int4.block_bytes - int4.k_scale
    assert 2 * mixed.block_bytes == int8.block_bytes + int4.block_bytes and mixed.v_codes % 16 == 0
    entries_ = random_entries(mixed, 5)
    filled = torch.arange(entries) < entries_[3][:, None]
    raw = {layout: blocks.encode(*entries_, layout) for layout in (mixed, int8, int4)}
    for read, same in ((blocks.read_keys, int8), (blocks.read_values, int4), (blocks.read_bias, int4)):
        assert torch.equal(read(raw[mixed], mixed)[filled], read(raw[same], same)[filled])


@pytest.mark.parametrize("format", FORMATS)
def test_writing_one_value_touches_nothing_else(format: BlockFormat) -> None:
    layout = BlockLayout(format, 16, 24)
    keys, values, bias, lens = random_entries(layout, 4)
    lens[:] = 16
    raw = blocks.encode(keys, values, bias, lens, layout)
    before = raw.clone()
    where = (torch.tensor([2, 0]), torch.tensor([5, 15]))
    new = torch.randn(2, 24)
    blocks.write_values(raw, where, new, layout)
    blocks.write_bias(raw, where, torch.tensor([1.5, -2.0]), layout)
    values[where], bias[where] = new, torch.tensor([1.5, -2.0])
    assert torch.equal(raw, blocks.encode(keys, values, bias, lens, layout))
    assert torch.equal(blocks.read_keys(raw, layout), blocks.read_keys(before, layout))


def test_constant_channels_and_huge_values_stay_finite() -> None:
    layout = BlockLayout("int4", 16, 16)
    keys = torch.full((1, 16, 16), 3.25)
    values = torch.full((1, 16, 16), 1e6)
    raw = blocks.encode(keys, values, torch.zeros(1, 16), torch.tensor([16]), layout)
    assert torch.equal(blocks.read_keys(raw, layout), keys)
    assert blocks.read_values(raw, layout).isfinite().all()
