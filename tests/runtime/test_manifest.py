"""A sound engine directory loads; every kind of damage is refused with its reason."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime import manifest
from runtime.config import EngineLimits, ModelSpec, RopeSpec
from runtime.engine_interface import StepLimits, make_interface
from runtime.errors import ManifestError
from runtime.manifest import EngineFile, Manifest, SourceModel, TokenInfo, TrtFacts

CONTENTS = {"weights.safetensors": b"w" * 1000, "tokenizer.json": b"{}", "chat_template.jinja": b"{{ x }}"}


def make() -> Manifest:
    return Manifest(
        target="cpu",
        model=ModelSpec(
            family="qwen2",
            num_layers=2,
            hidden_size=64,
            ffn_size=96,
            num_q_heads=4,
            num_kv_heads=2,
            head_dim=16,
            vocab_size=300,
            rms_eps=1e-6,
            rope=RopeSpec(theta=10000.0, kind="yarn", factor=4.0, original_max_positions=64),
            max_positions=256,
            tied_embeddings=True,
            eos_token_ids=(2, 5),
        ),
        limits=EngineLimits(max_seq_len=128),
        tokens=TokenInfo("<s>", "</s>", True, (("<s>", 1), ("</s>", 2), ("<|end|>", 5))),
        source=SourceModel("tiny", "gguf", "ab" * 32),
        files=tuple(EngineFile(n, len(c), hashlib.sha256(c).hexdigest()) for n, c in CONTENTS.items()),
        versions=(("torch", "2.13.0"),),
        built_at="2026-01-01T00:00:00+00:00",
    )


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    manifest.write(make(), tmp_path)
    return tmp_path


def test_round_trip(engine: Path) -> None:
    loaded = manifest.load(engine, target="cpu")
    assert loaded == make()
    assert loaded.end_tokens == ("</s>", "<|end|>")
    assert loaded.has_file("chat_template.jinja") and not loaded.has_file("other")


def change(engine: Path, edit: Callable[[Any], None]) -> None:
    path = engine / manifest.MANIFEST_FILE
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


EDITS: dict[str, tuple[Callable[[Any], None], str]] = {
    "version": (lambda d: d.update(format_version=99), "format_version is 99, expected 1"),
    "no version": (lambda d: d.pop("format_version"), "format_version is None"),
    "missing field": (lambda d: d["model"].pop("head_dim"), "manifest.model: missing or unknown fields head_dim"),
    "unknown field": (lambda d: d.update(extra=1), "fields extra"),
    "wrong type": (lambda d: d["model"].update(num_layers="2"), r"manifest.model.num_layers: got '2', expected int"),
    "not finite": (lambda d: d["model"].update(rms_eps=float("nan")), "rms_eps: got nan, expected float"),
    "bool is no int": (lambda d: d["limits"].update(max_seq_len=True), "max_seq_len: got True"),
    "unknown family": (lambda d: d["model"].update(family="gpt"), "manifest.model.family: got 'gpt'"),
    "short pair": (lambda d: d["versions"].append(["torch"]), r"manifest.versions\[1\]"),
    "absurd limit": (lambda d: d["limits"].update(page_tokens=9), "page_tokens: got 9"),
    "no weights": (lambda d: d["files"].pop(0), "lists no weights.safetensors"),
    "path": (lambda d: d["files"][2].update(name="../x"), "is a path"),
}


@pytest.mark.parametrize("name", EDITS)
def test_damaged_manifest(engine: Path, name: str) -> None:
    edit, reason = EDITS[name]
    change(engine, edit)
    with pytest.raises(ManifestError, match=reason) as caught:
        manifest.load(engine)
    assert "build the engine again" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\xff\x00"])
def test_no_json_object(engine: Path, text: str) -> None:
    (engine / manifest.MANIFEST_FILE).write_text(text, encoding="latin-1")
    with pytest.raises(ManifestError, match=r"damaged|expected a JSON object"):
        manifest.load(engine)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="expected a directory"):
        manifest.load(tmp_path / "nowhere")
    with pytest.raises(ManifestError, match="no finished engine"):
        manifest.load(tmp_path)


def test_wrong_target(engine: Path) -> None:
    with pytest.raises(ManifestError, match="was built for cpu, expected trt"):
        manifest.load(engine, target="trt")


def test_damaged_files(engine: Path) -> None:
    weights = engine / "weights.safetensors"
    weights.write_bytes(b"w" * 999)
    with pytest.raises(ManifestError, match="has 999 bytes, expected 1000"):
        manifest.load(engine, verify=False)
    weights.write_bytes(b"w" * 999 + b"x")
    manifest.load(engine, verify=False)
    with pytest.raises(ManifestError, match="it was changed"):
        manifest.load(engine)
    weights.unlink()
    with pytest.raises(ManifestError, match="is missing"):
        manifest.load(engine, verify=False)


def test_every_field_is_written(engine: Path) -> None:
    data = json.loads((engine / manifest.MANIFEST_FILE).read_text())
    assert set(data) == {field.name for field in dataclasses.fields(Manifest)} - {"trt"}  # of GPU engines alone


@pytest.fixture
def gpu_engine(tmp_path: Path) -> Path:
    contents = {manifest.PLAN_FILE: b"p" * 500, "tokenizer.json": b"{}"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    record, step = make(), StepLimits(64, "int4", 1)
    digest = make_interface(record.model, record.limits, step).sha256()
    files = tuple(EngineFile(n, len(c), hashlib.sha256(c).hexdigest()) for n, c in contents.items())
    facts = TrtFacts(120, "tensorrt_rtx", "1.7.1", "native", step, digest)
    manifest.write(dataclasses.replace(record, target="trt-rtx", files=files, trt=facts), tmp_path)
    return tmp_path


def test_gpu_engine_round_trip(gpu_engine: Path) -> None:
    loaded = manifest.load(gpu_engine, target="trt-rtx", sm=120)
    assert loaded.trt is not None and loaded.trt.step == StepLimits(64, "int4", 1)
    with pytest.raises(
        ManifestError, match="was built for SM 120, expected 90, that of this GPU; build it with --sm 90"
    ):
        manifest.load(gpu_engine, sm=90)
    with pytest.raises(ManifestError, match="was built for trt-rtx, expected cpu"):
        manifest.load(gpu_engine, target="cpu")


GPU_EDITS: dict[str, tuple[Callable[[Any], None], str]] = {
    "other limits": (lambda d: d["limits"].update(max_batch_size=3), "has inputs and outputs .* expected"),
    "other step": (lambda d: d["trt"]["step"].update(max_step_tokens=65), "has inputs and outputs .* expected"),
    "impossible step": (lambda d: d["trt"]["step"].update(max_step_tokens=1), "max_step_tokens: got 1"),
    "no record": (lambda d: d.pop("trt"), "is for trt-rtx and has no record of TensorRT"),
    "cpu with record": (lambda d: d.update(target="cpu"), "is for cpu and has a record of TensorRT"),
    "unknown form": (lambda d: d["trt"].update(form="magic"), "manifest.trt.form: got 'magic'"),
    "no plan": (lambda d: d["files"].pop(0), "lists no engine.plan"),
}


@pytest.mark.parametrize("name", GPU_EDITS)
def test_damaged_gpu_engine(gpu_engine: Path, name: str) -> None:
    edit, reason = GPU_EDITS[name]
    change(gpu_engine, edit)
    with pytest.raises(ManifestError, match=reason):
        manifest.load(gpu_engine)


def test_cpu_manifest_says_nothing_of_tensorrt(engine: Path) -> None:
    assert "trt" not in json.loads((engine / manifest.MANIFEST_FILE).read_text())
