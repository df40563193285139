"""Rotary embedding (Su et al., 2021) and its scaled forms, for every lowering.

Channel i of a head of size D pairs with channel i + D/2 (Hugging Face's convention). A row at position p turns pair
i by p * f_i; the formulas of f and the factor on cos and sin are those of the models' published code: linear
interpolation (Chen et al., 2023), Llama 3.1's piecewise form, YaRN (Peng et al., 2309.00071).
"""

from __future__ import annotations

import math

import torch

from runtime.config import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """f as [head_dim / 2] fp32, in radians per position. A TensorRT lowering takes it as a constant."""
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / powers
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, powers, head_dim)
    return plain


def rotary_tables(
    frequencies: torch.Tensor, positions: torch.Tensor, attention_factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for positions [rows] int64: two tensors [rows, head_dim / 2] fp32, attention factor included."""
    angles = positions.to(torch.float32).unsqueeze(1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    if attention_factor != 1.0:
        return cos * attention_factor, sin * attention_factor
    return cos, sin


def rotate(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x [rows, heads, head_dim] turned by cos, sin [rows, head_dim / 2]; computed in fp32, returned in x's dtype."""
    cos, sin = (table.unsqueeze(1) for table in rotary)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _llama3(rope: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    wavelength = 2 * math.pi / plain
    turns = rope.original_max_positions / wavelength
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = torch.where(turns < rope.low_freq_factor, plain / rope.factor, blended)
    return torch.where(turns > rope.high_freq_factor, plain, scaled)


def _yarn(rope: RopeSpec, powers: torch.Tensor, head_dim: int) -> torch.Tensor:
    def correction_channel(turns: float) -> float:
        """The (real-valued) channel pair that turns `turns` times over the original context."""
        ratio = rope.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low = max(math.floor(correction_channel(rope.beta_fast)), 0)
    high = min(math.ceil(correction_channel(rope.beta_slow)), head_dim - 1)
    width = float(high - low) or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return (1.0 / (rope.factor * powers)) * ramp + (1.0 / powers) * (1 - ramp)
