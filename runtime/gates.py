"""Reads what was trained for a model: scorers and merging networks, safetensors files in runtime/policy/gates/.

Scorers of gated R-KV are written by perf.train_gate, networks that merge super tokens by perf.train_merge.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch

from plugins.commit.gate import GateWeights
from plugins.commit.merger import MergeWeights
from runtime.errors import ConfigError
from runtime.rotation import hadamard

GATES_DIR = Path(__file__).parent / "policy" / "gates"


def load_gate(file: str, device: torch.device, *, rotated: bool = False) -> GateWeights:
    """Weights of one scorer, fp32; `rotated`: for values that an engine keeps rotated, with the same scores.

    Raises ConfigError when the file is missing or damaged.
    """
    tensors = _load(file, ("weight", "bias"), device, "gate: {}, expected the weights of a trained scorer; restore it, "
                    "or train one with python -m perf.train_gate")  # fmt: skip
    weight = tensors["weight"]
    if rotated:
        k, v, pos = weight.tensor_split([weight.shape[1] // 2, weight.shape[1] - 1], dim=1)
        weight = torch.cat([k, v @ hadamard(v.shape[1]).to(device), pos], dim=1)
    return GateWeights(weight, tensors["bias"])


def load_merger(file: str, device: torch.device, *, rotated: bool = False) -> MergeWeights:
    """Weights of the networks that merge spans, fp32; `rotated`: as for `load_gate`.

    Raises ConfigError when the file is missing or damaged.
    """
    names = tuple(field.name for field in fields(MergeWeights))
    tensors = _load(file, names, device, "merger: {}, expected the weights of a trained network; restore it, or train "
                    "one with python -m perf.train_merge")  # fmt: skip
    if rotated:
        hidden = tensors["hidden"]
        k, v, score = hidden.tensor_split([hidden.shape[1] // 2, hidden.shape[1] - 1], dim=1)
        tensors["hidden"] = torch.cat([k, hadamard(v.shape[1]).to(device) @ v, score], dim=1)
    return MergeWeights(**tensors)


def _load(file: str, names: tuple[str, ...], device: torch.device, message: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file  # not needed where nothing trained is used, such as a bare GPU machine

    path = GATES_DIR / file
    try:
        tensors = load_file(path, device=str(device))
        return {name: tensors[name].float() for name in names}
    except Exception as error:  # safetensors raises its own, OSError and KeyError
        raise ConfigError(message.format(f"{path} cannot be read ({error})")) from error
