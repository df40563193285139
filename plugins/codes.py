"""Codes of 4 and 8 bits: how they are packed, and the range that they span."""

from __future__ import annotations

import torch

FP16_MAX = 65504.0


def unpack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., row_bytes] uint8 of 4- or 8-bit codes -> [..., D] fp32 whole numbers."""
    if bits == 8:
        return codes.float()
    half = codes.shape[-1]
    out = torch.empty((*codes.shape[:-1], 2 * half), dtype=torch.float32, device=codes.device)
    out[..., :half] = codes & 15
    out[..., half:] = codes >> 4
    return out


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., D] whole numbers of any dtype -> [..., row_bytes] uint8 of 4- or 8-bit codes."""
    codes = codes.to(torch.uint8)
    if bits == 8:
        return codes
    half = codes.shape[-1] // 2
    return codes[..., :half] | (codes[..., half:] << 4)


def fp16_range(low: torch.Tensor, high: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum, fp16, whose codes 0 .. 2^bits - 1 span [low, high]; scale 0 where the range is a point."""
    minimum = low.clamp(-FP16_MAX, FP16_MAX).half()
    scale = ((high - minimum.float()) / ((1 << bits) - 1)).clamp(0.0, FP16_MAX).half()
    return scale, minimum


def to_codes(x: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, bits: int) -> torch.Tensor:
    """Nearest code of x fp32 under fp16 scale and minimum (broadcast): fp32 whole numbers 0 .. 2^bits - 1."""
    step = scale.float()
    codes = (x - minimum.float()) / torch.where(step > 0, step, 1.0)
    return torch.where(step > 0, codes, 0.0).round_().clamp_(0, (1 << bits) - 1)
