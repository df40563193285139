"""Policy files: written, read, taken by an engine, and refused field by field."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime import manifest as manifests
from runtime.config import ModelSpec
from runtime.errors import CommitKVError, ConfigError
from runtime.policy import registry
from runtime.policy.policy_file import (
    add_policy,
    is_policy_file,
    load_policy,
    make_policy_file,
    read_policy_file,
    write_policy_file,
)
from runtime.wiring import resolve_policy


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files add their policies to the process; here to a copy."""
    known = dict(registry.ALL_POLICIES)
    monkeypatch.setattr("runtime.policy.policy_file.ALL_POLICIES", known)
    monkeypatch.setattr(registry, "ALL_POLICIES", known)


@pytest.fixture
def spec(tiny_engine_dir: Path) -> ModelSpec:
    return replace(manifests.load(tiny_engine_dir, verify=False).model, name="Some-Model.Q4_1")


CHANGES = {
    "budget_ratio": 0.2,
    "absorb_gate": None,
    "schedule": {"recent_tokens": 64},
    "protection": {"phrases": False},
}


def written(tmp_path: Path, spec: ModelSpec, **record: Any) -> Path:
    """A good file with fields of its record replaced; a field that is `...` is left out."""
    path = tmp_path / "policy.json"
    write_policy_file(path, make_policy_file("mine", spec, "commitkv", CHANGES), {"kl": 0.01})
    data = json.loads(path.read_text(encoding="utf-8")) | record
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not ...}), encoding="utf-8")
    return path


def test_a_file_gives_its_policy_back(tmp_path: Path, spec: ModelSpec) -> None:
    path = written(tmp_path, spec)
    policy = load_policy(path, spec)
    base = registry.ALL_POLICIES["commitkv"]
    assert policy == replace(
        base,
        name="mine",
        budget_ratio=0.2,
        absorb_gate=None,
        schedule=replace(base.schedule, recent_tokens=64),
        protection=replace(base.protection, phrases=False),
    )
    assert registry.get_policy("mine") is policy is load_policy(path, spec)
    assert read_policy_file(path).model.name == "Some-Model"  # without the file's quantization


def test_the_quantization_of_the_weights_does_not_matter(tmp_path: Path, spec: ModelSpec) -> None:
    assert load_policy(written(tmp_path, spec), replace(spec, name="Some-Model")).name == "mine"


@pytest.mark.parametrize(
    ("field", "value"), [("name", "Another"), ("num_layers", 3), ("num_kv_heads", 9), ("head_dim", 128)]
)
def test_a_file_of_another_model_is_refused(tmp_path: Path, spec: ModelSpec, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{field} is .* chosen for another model"):
        load_policy(written(tmp_path, spec), replace(spec, **{field: value}))
    assert "mine" not in registry.ALL_POLICIES


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"format_version": 2}, "format_version: got 2"),
        ({"format_version": "1"}, "format_version"),
        ({"name": ...}, "name: is missing"),
        ({"name": "My Policy"}, "name: got 'My Policy'"),
        ({"name": "full"}, "name: 'full' is another policy already"),
        ({"name": 5}, "name: got 5, expected str"),
        ({"base": "magic"}, "magic"),
        ({"surprise": 1}, "surprise: unknown"),
        ({"model": 5}, "model: got int"),
        ({"model": {"name": "x", "num_layers": 1, "num_kv_heads": 2}}, "model.head_dim: missing"),
        ({"model": {"name": "x", "num_layers": 1.5, "num_kv_heads": 2, "head_dim": 4}}, "model.num_layers: got 1.5"),
        ({"changes": []}, "changes: got list"),
        ({"changes": {"budget_ratio": 0}}, "budget_ratio of commitkv: got 0.0"),
        ({"changes": {"budget_ratio": 1.5}}, "budget_ratio of commitkv: got 1.5"),
        ({"changes": {"budget_ratio": "much"}}, "changes.budget_ratio: got 'much', expected float"),
        ({"changes": {"budget_ratio": True}}, "changes.budget_ratio: got True"),
        ({"changes": {"block_format": "int3"}}, "block_format"),
        ({"changes": {"score": "gate"}}, "gate of commitkv"),
        ({"changes": {"share": "row"}}, "changes.share: got 'row'"),
        ({"changes": {"tiers": []}}, "changes.tiers: not a field"),
        ({"changes": {"name": "x"}}, "changes.name: not a field"),
        ({"changes": {"schedule": {"recent_tokens": 1.5}}}, "changes.schedule.recent_tokens: got 1.5, expected int"),
        ({"changes": {"schedule": {"magic": 1}}}, "changes.schedule.magic: not a field"),
        ({"changes": {"protection": 1}}, "changes.protection: got int"),
    ],
)
def test_bad_files_are_refused_by_field(tmp_path: Path, spec: ModelSpec, record: dict[str, Any], message: str) -> None:
    path = written(tmp_path, spec, **record)
    with pytest.raises(ConfigError) as caught:
        load_policy(path, spec)
    assert str(path) in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe"])
def test_files_that_are_no_json_objects(tmp_path: Path, spec: ModelSpec, content: bytes) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.json"):
        load_policy(tmp_path / "bad.json", spec)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_policy(tmp_path / "absent.json", spec)


def test_a_name_means_one_policy(spec: ModelSpec) -> None:
    mine = make_policy_file("mine", spec, "commitkv", {"budget_ratio": 0.2}).policy
    assert add_policy(mine) is add_policy(replace(mine))
    with pytest.raises(ConfigError, match="another policy"):
        add_policy(replace(mine, budget_ratio=0.3))


def test_names_and_files_are_told_apart(tmp_path: Path, tiny_engine_dir: Path) -> None:
    model = manifests.load(tiny_engine_dir, verify=False).model
    path = tmp_path / "policy.json"
    write_policy_file(path, make_policy_file("mine", model, "commitkv", CHANGES), {})
    assert is_policy_file(str(path)) and not is_policy_file("commitkv")
    assert resolve_policy("commitkv", tiny_engine_dir) == "commitkv"
    assert resolve_policy(str(path), tiny_engine_dir) == "mine"
    for text in ("magic", str(tmp_path / "absent.json")):
        with pytest.raises(CommitKVError):
            resolve_policy(text, tiny_engine_dir)
