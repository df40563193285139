"""The rotation that an engine's values may be kept in (`EngineLimits.rotate_values`)."""

from __future__ import annotations

import math

import torch


def is_rotatable(size: int) -> bool:
    """Whether `hadamard` has a matrix of this size."""
    return size > 0 and size & (size - 1) == 0


def hadamard(size: int) -> torch.Tensor:
    """[size, size] fp32, symmetric with orthonormal rows; size is a power of two (Sylvester's construction)."""
    assert is_rotatable(size), size
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)
