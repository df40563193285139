"""Reads the trained scorers of gated R-KV: safetensors files in runtime/policy/gates/, written by perf.train_gate."""

from __future__ import annotations

from pathlib import Path

import torch

from plugins.commit.gate import GateWeights
from runtime.errors import ConfigError

GATES_DIR = Path(__file__).parent / "policy" / "gates"


def load_gate(file: str, device: torch.device) -> GateWeights:
    """Weights of one scorer, fp32. Raises ConfigError when the file is missing or damaged."""
    from safetensors.torch import load_file  # not needed where no gate is used, such as a bare machine with a GPU

    path = GATES_DIR / file
    try:
        tensors = load_file(path, device=str(device))
        return GateWeights(tensors["weight"].float(), tensors["bias"].float())
    except Exception as error:  # safetensors raises its own, OSError and KeyError
        raise ConfigError(
            f"gate: {path} cannot be read ({error}), expected the weights of a trained scorer; restore it, or train "
            f"one with python -m perf.train_gate"
        ) from error
