"""Rotates V through the weights, so that it is rounded better and nothing costs more.

With H an orthonormal Hadamard matrix, W_v becomes H W_v for every KV head and W_o becomes W_o H^T for every query head.
Attention weighs values and adds them up, so it comes out rotated too, and W_o turns it back: a step computes what it
did, up to rounding. But what single channels of V carried is spread over all of them, and four bits lose less of it
(QuaRot, arXiv 2404.00456; `python -m perf.code_bits` measures it). K stays as it is: rotary embedding stands between
its weights and what is kept.
"""

from __future__ import annotations

import torch

from builder.weights.checkpoint import TensorSource
from runtime.config import ModelSpec
from runtime.errors import ConfigError
from runtime.rotation import hadamard, is_rotatable

_V_NAMES = ("self_attn.v_proj.weight", "self_attn.v_proj.bias")
_OUTPUT_NAME = "self_attn.o_proj.weight"


class RotatedValues:
    """`builder.weights.checkpoint.TensorSource` of another's tensors, V rotated."""

    def __init__(self, tensors: TensorSource, spec: ModelSpec) -> None:
        """Raises ConfigError for a head_dim that has no such rotation."""
        if not is_rotatable(spec.head_dim):
            raise ConfigError(
                f"rotate_values: {spec.name} has heads of {spec.head_dim} channels, expected a power of two; build "
                f"without --rotate-values"
            )
        self._tensors, self._rotation = tensors, hadamard(spec.head_dim)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._tensors.shape(name)

    def read(self, name: str) -> torch.Tensor:
        """fp32 where it is rotated."""
        data, size = self._tensors.read(name), self._rotation.shape[0]
        if name.endswith(_V_NAMES):  # [heads * size, hidden] or [heads * size]
            heads = data.float().reshape(-1, size, data[0].numel())
            return (self._rotation @ heads).reshape(data.shape)
        if name.endswith(_OUTPUT_NAME):  # [hidden, heads * size]
            return (data.float().reshape(-1, size) @ self._rotation.T).reshape(data.shape)
        return data
