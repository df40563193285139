"""Weights in one or many safetensors files, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from builder.weights.checkpoint import read_json
from runtime.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FLOATS = ("F32", "BF16", "F16")


def open_file(path: Path) -> Any:
    """A mapped safetensors file, or CheckpointError."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; copy the complete model directory")
    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # the library raises its own error type and OSError
        raise CheckpointError(
            f"{path}: truncated or damaged safetensors file ({error}); fetch the file again"
        ) from error


class SafetensorsSource:
    """`TensorSource` over a set of files; `where` maps a tensor's name to the file that holds it."""

    def __init__(self, files: Mapping[Path, Any], where: Mapping[str, Path]) -> None:
        self._files = files
        self._where = where

    def shape(self, name: str) -> tuple[int, ...] | None:
        path = self._where.get(name)
        return None if path is None else tuple(self._files[path].get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        path = self._where[name]
        kind = self._files[path].get_slice(name).get_dtype()
        if kind not in _FLOATS:
            raise CheckpointError(
                f"{path}: tensor {name} is {kind}, expected {', '.join(_FLOATS)}; use an unquantized model"
            )
        tensor: torch.Tensor = self._files[path].get_tensor(name)
        return tensor


def open_directory(directory: Path) -> tuple[SafetensorsSource, tuple[Path, ...]]:
    """The weights of a Hugging Face directory and the files that hold them."""
    index = directory / INDEX_FILE
    if (directory / SINGLE_FILE).is_file() or not index.is_file():
        path = directory / SINGLE_FILE
        if not path.is_file() and list(directory.glob("*.bin")):
            raise CheckpointError(
                f"{directory}: weights are in .bin files, expected safetensors; save it as safetensors"
            )
        file = open_file(path)
        return SafetensorsSource({path: file}, dict.fromkeys(file.keys(), path)), (path,)
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{index}: weight_map is missing, expected tensor names and their files; fetch it again")
    for shard in set(listed.values()):
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index}: shard name {shard!r}, expected a file name; fetch it again")
    files = {directory / shard: open_file(directory / shard) for shard in sorted(set(listed.values()))}
    where = {name: path for path, file in files.items() for name in file.keys()}  # noqa: SIM118
    return SafetensorsSource(files, where), (index, *files)
