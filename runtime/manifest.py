"""What the builder wrote about an engine; checked when the engine is loaded.

Files inside an engine directory:
    manifest.json          this record, as JSON
    weights.safetensors    for the CPU: fused weights, named as in `builder.model.weight_recipes`
    engine.plan            for TensorRT instead: the built engine, weights included
    tokenizer.json         Hugging Face `tokenizers` form
    chat_template.jinja    only when the model has a chat template
Nothing else belongs there. Every file but the manifest is listed in it with its size and SHA-256.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from runtime.config import EngineLimits, ModelSpec
from runtime.engine_interface import StepLimits, make_interface
from runtime.errors import CommitKVError, ManifestError

FORMAT_VERSION = 1
COMMITKV_VERSION = "0.1.0"
MANIFEST_FILE = "manifest.json"
WEIGHTS_FILE = "weights.safetensors"
PLAN_FILE = "engine.plan"
TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"

REBUILD = "build the engine again with builder/build.py"

R = TypeVar("R")


@dataclass(frozen=True)
class EngineFile:
    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class SourceModel:
    """Where the weights came from. sha256: over the names and contents of all source files."""

    name: str
    kind: Literal["gguf", "huggingface", "tensorrt_llm"]
    sha256: str


@dataclass(frozen=True)
class TokenInfo:
    """bos_token, eos_token: texts for the chat template, '' where the model has none.

    add_bos: a raw prompt (no chat template) starts with the bos token.
    special_tokens: (text, id) of every special token, by id.
    """

    bos_token: str
    eos_token: str
    add_bos: bool
    special_tokens: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class TrtFacts:
    """What a TensorRT engine fits to.

    sm: of the GPU, 10 * major + minor.   package, version: whose TensorRT reads the plan.
    form: of the operations on the KV arenas.
    interface_sha256: of the `EngineInterface` that model, limits and step give.
    """

    sm: int
    package: Literal["tensorrt", "tensorrt_rtx"]
    version: str
    form: Literal["plugin", "native"]
    step: StepLimits
    interface_sha256: str


@dataclass(frozen=True)
class Manifest:
    """built_at: UTC, ISO 8601. versions: (package, version) pairs of what built it. trt: None for the CPU."""

    target: Literal["cpu", "trt", "trt-rtx"]
    model: ModelSpec
    limits: EngineLimits
    tokens: TokenInfo
    source: SourceModel
    files: tuple[EngineFile, ...]
    versions: tuple[tuple[str, str], ...]
    built_at: str
    format_version: int = FORMAT_VERSION
    trt: TrtFacts | None = None

    def has_file(self, name: str) -> bool:
        return any(file.name == name for file in self.files)

    @property
    def end_tokens(self) -> tuple[str, ...]:
        """Texts of the special tokens that end an answer, for `ChatFormat`."""
        return tuple(text for text, index in self.tokens.special_tokens if index in self.model.eos_token_ids)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content as hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write(manifest: Manifest, engine_dir: Path) -> None:
    """Write `manifest.json`; the caller makes the directory appear atomically."""
    record = dataclasses.asdict(manifest)
    if manifest.trt is None:
        del record["trt"]
    text = json.dumps(record, indent=2, ensure_ascii=False)
    (engine_dir / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")


def load(engine_dir: Path, *, target: str | None = None, sm: int | None = None, verify: bool = True) -> Manifest:
    """Read and check an engine directory.

    target: what the caller can run; None takes any.   sm: of its GPU, 10 * major + minor; None takes any.
    verify: also compare every file's SHA-256, not only its size. Raises ManifestError with the reason.
    """
    path = engine_dir / MANIFEST_FILE
    if not engine_dir.is_dir():
        raise ManifestError(f"engine: got {engine_dir}, expected a directory made by builder/build.py; {REBUILD}")
    if not path.is_file():
        raise ManifestError(f"engine: {engine_dir} holds no {MANIFEST_FILE}, so it is no finished engine; {REBUILD}")
    manifest = _parse(path)
    if target is not None and manifest.target != target:
        raise ManifestError(
            f"engine: {engine_dir} was built for {manifest.target}, expected {target}; "
            f"build it with --target {target} or start the runtime for {manifest.target}"
        )
    _check_trt(manifest, engine_dir, sm)
    _check_files(manifest, engine_dir, verify)
    return manifest


def _parse(path: Path) -> Manifest:
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise ManifestError(f"{path}: damaged ({error}), expected JSON; {REBUILD}") from error
    if not isinstance(data, dict):
        raise ManifestError(f"{path}: got {type(data).__name__}, expected a JSON object; {REBUILD}")
    version = data.get("format_version")
    if version != FORMAT_VERSION:
        raise ManifestError(
            f"{path}: format_version is {version!r}, expected {FORMAT_VERSION}; {REBUILD} of this version of CommitKV"
        )
    try:
        return _record(Manifest, data, "manifest")
    except CommitKVError as error:
        raise ManifestError(f"{path}: {error}; {REBUILD}") from error


def _check_trt(manifest: Manifest, engine_dir: Path, sm: int | None) -> None:
    facts = manifest.trt
    if (facts is None) != (manifest.target == "cpu"):
        raise ManifestError(
            f"engine: the manifest of {engine_dir} is for {manifest.target} and has {'no' if facts is None else 'a'} "
            f"record of TensorRT; {REBUILD}"
        )
    if facts is None:
        return
    try:
        expected = make_interface(manifest.model, manifest.limits, facts.step).sha256()
    except CommitKVError as error:
        raise ManifestError(f"engine: {engine_dir}: {error}; {REBUILD}") from error
    if facts.interface_sha256 != expected:
        raise ManifestError(
            f"engine: {engine_dir} has inputs and outputs {facts.interface_sha256[:16]}…, expected {expected[:16]}…, "
            f"those of this version of CommitKV for its limits; {REBUILD}"
        )
    if sm is not None and facts.sm != sm:
        raise ManifestError(
            f"engine: {engine_dir} was built for SM {facts.sm}, expected {sm}, that of this GPU; "
            f"build it with --sm {sm}"
        )


def _check_files(manifest: Manifest, engine_dir: Path, verify: bool) -> None:
    names = [file.name for file in manifest.files]
    for needed in (WEIGHTS_FILE if manifest.target == "cpu" else PLAN_FILE, TOKENIZER_FILE):
        if needed not in names:
            raise ManifestError(f"engine: the manifest of {engine_dir} lists no {needed}; {REBUILD}")
    for file in manifest.files:
        if Path(file.name).name != file.name:
            raise ManifestError(f"engine: file name {file.name!r} in the manifest of {engine_dir} is a path; {REBUILD}")
        path = engine_dir / file.name
        if not path.is_file():
            raise ManifestError(f"engine: {path} is missing, expected {file.size_bytes} bytes; {REBUILD}")
        size = path.stat().st_size
        if size != file.size_bytes:
            raise ManifestError(f"engine: {path} has {size} bytes, expected {file.size_bytes}; {REBUILD}")
        if verify and (digest := file_sha256(path)) != file.sha256:
            raise ManifestError(
                f"engine: {path} has SHA-256 {digest[:16]}…, expected {file.sha256[:16]}…: it was changed; {REBUILD}"
            )


def _record(kind: type[R], data: Any, where: str) -> R:
    """Build dataclass `kind` from parsed JSON, checking names and types all the way down."""
    if not isinstance(data, dict):
        raise ManifestError(f"{where}: got {type(data).__name__}, expected an object")
    hints = get_type_hints(kind)
    fields = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if kind is Manifest:
        data = {"trt": None, **data}  # not written for the CPU
    if set(data) != fields:
        wrong = sorted(set(data) ^ fields)
        raise ManifestError(f"{where}: missing or unknown fields {', '.join(wrong)}")
    return kind(**{name: _value(hints[name], data[name], f"{where}.{name}") for name in fields})


def _value(hint: Any, data: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _record(hint, data, where)  # type: ignore[arg-type]
    if origin in (Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        return _value(next(arg for arg in args if arg is not type(None)), data, where)
    if origin is Literal:
        good = data in args
    elif origin is tuple and isinstance(data, list):
        if args[-1] is Ellipsis:
            return tuple(_value(args[0], item, f"{where}[{i}]") for i, item in enumerate(data))
        if len(args) == len(data):
            return tuple(
                _value(arg, item, f"{where}[{i}]") for i, (arg, item) in enumerate(zip(args, data, strict=True))
            )
        good = False
    elif hint is float:
        good = isinstance(data, (int, float)) and not isinstance(data, bool) and math.isfinite(data)
    else:
        good = type(data) is hint
    if not good:
        raise ManifestError(f"{where}: got {data!r:.60}, expected {getattr(hint, '__name__', hint)}")
    return float(data) if hint is float else data
