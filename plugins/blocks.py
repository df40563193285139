"""Committed blocks as bytes: quantize and pack entries, and bring them back. Keys of two widths: `mixed_keys`.

Everything works on `raw` [n, block_bytes] uint8: an arena, or blocks gathered from one. Geometry comes from
`plugins.layout.BlockLayout`. Scales and minima are rounded to fp16 *before* codes are computed from them, so
that quantizing dequantized values again with the same range gives the same codes.
"""

from __future__ import annotations

import torch

from plugins.codes import fp16_range, pack_codes, to_codes, unpack_codes
from plugins.layout import BlockLayout
from plugins.mixed_keys import read_mixed_keys, write_mixed_keys

VALUE_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def fp16_field(raw: torch.Tensor, offset: int, count: int) -> torch.Tensor:
    """View [n, count] fp16 of the field that starts `offset` bytes into every block."""
    return raw[:, offset : offset + 2 * count].view(torch.float16)


def k_field(raw: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """View of K codes: [n, E, k_row_bytes] uint8 if quantized, else [n, E, D] of the values themselves.

    Not of mixed formats, whose rows are of two sizes.
    """
    assert not layout.mixed, layout.format
    return _codes_field(raw, layout.k_codes, layout.k_row_bytes, layout)


def v_field(raw: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """View of V codes: [n, E, v_row_bytes] uint8 if quantized, else [n, E, D] of the values themselves."""
    return _codes_field(raw, layout.v_codes, layout.v_row_bytes, layout)


def _codes_field(raw: torch.Tensor, offset: int, row_bytes: int, layout: BlockLayout) -> torch.Tensor:
    field = raw[:, offset : offset + layout.block_entries * row_bytes]
    if not layout.quantized:
        field = field.view(VALUE_DTYPES[layout.format])
    return field.view(raw.shape[0], layout.block_entries, field.shape[1] // layout.block_entries)


def read_keys(raw: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """[n, block_bytes] -> keys [n, E, D] fp32. Unfilled entries hold garbage, NaN included."""
    if layout.mixed:
        return read_mixed_keys(raw, layout)
    codes = k_field(raw, layout)
    if not layout.quantized:
        return codes.float()
    scale, minimum = (fp16_field(raw, at, layout.head_dim).float()[:, None] for at in (layout.k_scale, layout.k_min))
    return unpack_codes(codes, layout.k_bits).mul_(scale).add_(minimum)


def read_values(raw: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """[n, block_bytes] -> values [n, E, D] fp32. Unfilled entries hold garbage, NaN included."""
    codes = v_field(raw, layout)
    if not layout.quantized:
        return codes.float()
    entries = layout.block_entries
    scale, minimum = (fp16_field(raw, at, entries).float()[..., None] for at in (layout.v_scale, layout.v_min))
    return unpack_codes(codes, layout.v_bits).mul_(scale).add_(minimum)


def read_bias(raw: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """[n, block_bytes] -> biases [n, E] fp32. Unfilled entries hold garbage, NaN included."""
    return fp16_field(raw, layout.bias, layout.block_entries).float()


def values_at(
    raw: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor], layout: BlockLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [m, D] and biases [m], fp32, of entries where = (block index [m], entry in block [m])."""
    values = v_field(raw, layout)[where]
    bias = fp16_field(raw, layout.bias, layout.block_entries)[where].float()
    if not layout.quantized:
        return values.float(), bias
    scale = fp16_field(raw, layout.v_scale, layout.block_entries)[where].float()
    minimum = fp16_field(raw, layout.v_min, layout.block_entries)[where].float()
    return unpack_codes(values, layout.v_bits).mul_(scale[:, None]).add_(minimum[:, None]), bias


def encode(
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    lens: torch.Tensor,
    layout: BlockLayout,
    score: torch.Tensor | None = None,
) -> torch.Tensor:
    """Blocks of keys, values [n, E, D] fp32 and bias [n, E] fp32, of which the first lens[b] of block b are filled.

    score [n, E] fp32: in mixed formats the largest ones get the wide keys, the first entries without it.
    Returns [n, block_bytes] uint8; what is not filled is zero.
    """
    filled = torch.arange(layout.block_entries, device=keys.device)[None] < lens[:, None]
    raw = torch.zeros((keys.shape[0], layout.block_bytes), dtype=torch.uint8, device=keys.device)
    keys = torch.where(filled[..., None], keys, 0.0)
    if layout.quantized:
        low = torch.where(filled[..., None], keys, torch.inf).amin(dim=1)
        high = torch.where(filled[..., None], keys, -torch.inf).amax(dim=1)
        scale, minimum = fp16_range(low, high, layout.k_bits)
        fp16_field(raw, layout.k_scale, layout.head_dim).copy_(scale)
        fp16_field(raw, layout.k_min, layout.head_dim).copy_(minimum)
        if layout.mixed:
            write_mixed_keys(raw, layout, keys, filled, score)
        else:
            codes = to_codes(keys, scale[:, None], minimum[:, None], layout.k_bits)
            k_field(raw, layout).copy_(pack_codes(codes * filled[..., None], layout.k_bits))
    else:
        k_field(raw, layout).copy_(keys)
    block, entry = filled.nonzero(as_tuple=True)
    write_values(raw, (block, entry), values[block, entry], layout)
    fp16_field(raw, layout.bias, layout.block_entries).copy_(torch.where(filled, bias, 0.0))
    return raw


def write_values(
    raw: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor], values: torch.Tensor, layout: BlockLayout
) -> None:
    """Writes values [m, D] fp32 of entries where = (block index [m], entry in block [m]) in place.

    A value's scale is its own, so its neighbours keep their bytes.
    """
    if not layout.quantized:
        v_field(raw, layout)[where] = values.to(VALUE_DTYPES[layout.format])
        return
    scale, minimum = fp16_range(values.amin(dim=1), values.amax(dim=1), layout.v_bits)
    codes = to_codes(values, scale[:, None], minimum[:, None], layout.v_bits)
    v_field(raw, layout)[where] = pack_codes(codes, layout.v_bits)
    fp16_field(raw, layout.v_scale, layout.block_entries)[where] = scale
    fp16_field(raw, layout.v_min, layout.block_entries)[where] = minimum


def write_bias(
    raw: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor], bias: torch.Tensor, layout: BlockLayout
) -> None:
    """Writes bias [m] fp32 of entries where = (block index [m], entry in block [m]) in place."""
    fp16_field(raw, layout.bias, layout.block_entries)[where] = bias.half()
