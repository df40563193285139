"""Write an engine directory: fuse and convert weights one by one, hash them, and make the directory appear at once.

Everything goes to a temporary sibling first, is flushed to disk, and is renamed into place; an older engine there
is moved aside and removed only when the new one stands.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from tqdm import tqdm

from builder.lower_torch import SCALE_SUFFIX, TORCH_DTYPE
from builder.model import WeightRecipe, weight_recipes
from builder.weights.checkpoint import Checkpoint, TensorSource
from plugins.linear.params import Int8Weight
from runtime.errors import CheckpointError, ConfigError
from runtime.manifest import (
    CHAT_TEMPLATE_FILE,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    EngineFile,
    Manifest,
    file_sha256,
    write,
)
from runtime.policy.policy_file import POLICY_FILE

_SAFETENSORS_NAME = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8"}


@dataclass(frozen=True)
class WeightForm:
    """dtype: of activations and of what is no matrix.   int8: matrices become codes with a scale per output."""

    dtype: str
    int8: bool = False

    def source_dtype(self, recipe: WeightRecipe) -> torch.dtype:
        """What `store` takes: codes are found from the most exact values there are."""
        exact = recipe.is_norm or (self.int8 and len(recipe.shape) == 2)
        return torch.float32 if exact else TORCH_DTYPE[self.dtype]

    def columns(self, recipe: WeightRecipe) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, type and shape of each tensor that one engine weight is stored as."""
        if self.int8 and len(recipe.shape) == 2:
            return [
                (recipe.name, torch.int8, recipe.shape),
                (recipe.name + SCALE_SUFFIX, torch.float32, recipe.shape[:1]),
            ]
        return [(recipe.name, self.source_dtype(recipe), recipe.shape)]

    def store(self, data: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What `columns` names, of one engine weight in its own dtype."""
        if self.int8 and data.dim() == 2:
            weight = Int8Weight.of(data)
            return weight.codes, weight.scale
        return (data,)


def check_tensors(checkpoint: Checkpoint) -> None:
    """Every tensor that the engine needs is there in the right shape; CheckpointError names the first that is not."""
    for recipe in weight_recipes(checkpoint.spec):
        for name, shape in recipe.sources:
            got = checkpoint.tensors.shape(name)
            if got is None:
                raise CheckpointError(
                    f"{checkpoint.files[0]}: tensor {name} is missing, expected shape {list(shape)}; "
                    f"fetch the complete checkpoint"
                )
            if got != shape:
                raise CheckpointError(
                    f"{checkpoint.files[0]}: tensor {name} has shape {list(got)}, expected {list(shape)}; "
                    f"weights and configuration do not belong together"
                )


ContentWriter = Callable[[Path], EngineFile]
"""Writes what an engine runs, weights or a plan, into the directory it is given."""


def weights_writer(checkpoint: Checkpoint, form: WeightForm) -> ContentWriter:
    """For the CPU."""
    return lambda directory: _write_weights(checkpoint, form, directory / WEIGHTS_FILE)


def write_engine(
    checkpoint: Checkpoint,
    write_content: ContentWriter,
    output: Path,
    make_manifest: Callable[[tuple[EngineFile, ...]], Manifest],
    policy_text: str | None = None,
) -> None:
    """Build the directory `output`. make_manifest gets the finished files. Leaves nothing half-written behind.

    policy_text: content of the policy file of an engine that brings its own policy.

    Raises CheckpointError for bad tensors, ConfigError for a place that cannot be written to, and what write_content
    raises.
    """
    check_tensors(checkpoint)
    check_output(output)
    temporary = output.with_name(f".{output.name}.building-{os.getpid()}")
    with _clear_disk_errors(output):
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            files = [write_content(temporary)]
            files.append(_write_text(temporary / TOKENIZER_FILE, checkpoint.tokenizer.tokenizer_json))
            if checkpoint.tokenizer.chat_template is not None:
                files.append(_write_text(temporary / CHAT_TEMPLATE_FILE, checkpoint.tokenizer.chat_template))
            if policy_text is not None:
                files.append(_write_text(temporary / POLICY_FILE, policy_text))
            write(make_manifest(tuple(files)), temporary)
            _flush(temporary / MANIFEST_FILE)
            _flush(temporary)
            _put_in_place(temporary, output)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def check_output(output: Path) -> None:
    """Refuse to replace something that is no engine."""
    if not output.exists():
        return
    if not output.is_dir() or (any(output.iterdir()) and not (output / MANIFEST_FILE).is_file()):
        raise ConfigError(
            f"output: {output} exists and is no engine directory, expected a new path or an older engine; "
            f"choose another --output or remove it"
        )


def _write_weights(checkpoint: Checkpoint, form: WeightForm, path: Path) -> EngineFile:
    """The safetensors form, streamed: header first, since shapes and types are known before any weight is read."""
    recipes = weight_recipes(checkpoint.spec)
    header, total = {}, 0
    for recipe in recipes:
        for name, kind, shape in form.columns(recipe):
            size = kind.itemsize * torch.Size(shape).numel()
            header[name] = {"dtype": _SAFETENSORS_NAME[kind], "shape": shape, "data_offsets": [total, total + size]}
            total += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 16 + 8)  # data starts 16-byte aligned after the 8 length bytes
    free = shutil.disk_usage(path.parent).free
    if free < total + len(text):
        raise OSError(errno.ENOSPC, f"weights take {total / 1e6:.0f} MB, {free / 1e6:.0f} MB are free")
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="converting weights", mininterval=0.5)
    digest = hashlib.sha256()
    with path.open("wb") as stream, bar:
        _put(stream, digest.update, len(text).to_bytes(8, "little") + text)
        for recipe in recipes:
            for data in form.store(read_weight(recipe, checkpoint.tensors, form.source_dtype(recipe))):
                _put(stream, digest.update, data.view(torch.uint8).numpy().reshape(-1).data)
                bar.update(data.numel() * data.itemsize)
        stream.flush()
        os.fsync(stream.fileno())
    return EngineFile(path.name, path.stat().st_size, digest.hexdigest())


def write_file(path: Path, data: memoryview) -> EngineFile:
    """Writes, flushes and hashes one file."""
    if (free := shutil.disk_usage(path.parent).free) < data.nbytes:
        raise OSError(errno.ENOSPC, f"{path.name} takes {data.nbytes / 1e6:.0f} MB, {free / 1e6:.0f} MB are free")
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return EngineFile(path.name, data.nbytes, hashlib.sha256(data).hexdigest())


def _put(stream: BinaryIO, update: Callable[[bytes | memoryview], None], data: bytes | memoryview) -> None:
    stream.write(data)
    update(data)


def read_weight(recipe: WeightRecipe, tensors: TensorSource, dtype: torch.dtype) -> torch.Tensor:
    """One engine weight from its sources. Raises CheckpointError where it is not finite in `dtype`."""
    parts = [tensors.read(name).to(dtype) for name, _ in recipe.sources]
    data = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
    assert tuple(data.shape) == recipe.shape
    if not bool(torch.isfinite(data).all()):
        names = ", ".join(name for name, _ in recipe.sources)
        raise CheckpointError(
            f"tensor {names}: holds infinite or undefined numbers in {dtype}, expected finite ones; "
            f"fetch the checkpoint again, or choose --dtype bf16 or fp32 if it overflowed fp16"
        )
    return data


def _write_text(path: Path, text: str) -> EngineFile:
    path.write_text(text, encoding="utf-8")
    _flush(path)
    return EngineFile(path.name, path.stat().st_size, file_sha256(path))


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _put_in_place(temporary: Path, output: Path) -> None:
    old = output.with_name(f".{output.name}.old-{os.getpid()}")
    had_old = output.exists()
    if had_old:
        output.rename(old)
    try:
        temporary.rename(output)
    except OSError:
        if had_old:
            old.rename(output)
        raise
    _flush(output.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _clear_disk_errors(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(
                f"output: no room left for {output} ({error.strerror}); free space or choose another --output"
            ) from error
        raise ConfigError(f"output: cannot write {output} ({error}); check the path and its permissions") from error
