"""The gate of gated R-KV: p = sigmoid(W . [k; v; pos] + b), one W and b for each (layer, KV head).

Keys are read as they are stored, rotated; pos = position / POSITION_UNIT. `perf.train_gate` learns W and b.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

POSITION_UNIT = 1024.0


@dataclass(frozen=True, eq=False)
class GateWeights:
    """weight [rows, 2 * D + 1] fp32 over k, v and pos; bias [rows] fp32. A row is layer * G + kv_head."""

    weight: torch.Tensor
    bias: torch.Tensor


def gate_logits(kv: torch.Tensor, positions: torch.Tensor, weights: GateWeights) -> torch.Tensor:
    """kv [rows, n, 2, D] of any float type, positions [n] -> W . [k; v; pos] + b, [rows, n] fp32."""
    rows, count = kv.shape[:2]
    features = kv.float().reshape(rows, count, -1)
    linear = torch.bmm(features, weights.weight[:, :-1, None])[..., 0]
    pos = positions.float() / POSITION_UNIT
    return linear + weights.weight[:, -1:] * pos + weights.bias[:, None]
