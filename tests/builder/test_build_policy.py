"""`build.py --policy FILE`: an engine brings the policy of a file with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import save_tiny_model

from builder.build import main as build
from runtime import manifest as manifests
from runtime.config import RuntimeConfig
from runtime.policy import policy_file, registry
from runtime.policy.policy_file import POLICY_FILE
from runtime.request import Request, SamplingParams
from runtime.wiring import load_engine


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Policies that files add to the process stay of this test."""
    known = dict(registry.ALL_POLICIES)
    monkeypatch.setattr(registry, "ALL_POLICIES", known)
    monkeypatch.setattr(policy_file, "ALL_POLICIES", known)
    return known


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("Model")
    save_tiny_model(directory)
    return directory


def write_policy(path: Path, model_dir: Path, budget: float = 0.2, **model: Any) -> Path:
    shape = {"name": model_dir.name, "num_layers": 2, "num_kv_heads": 2, "head_dim": 16} | model
    changes = {"budget_ratio": budget, "schedule": {"min_tokens": 200, "recent_tokens": 64}}
    record = {"format_version": 1, "name": "mine", "model": shape, "base": "commitkv", "changes": changes}
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


def options(model_dir: Path, output: Path, policy: Path) -> list[str]:
    return ["--model", str(model_dir), "--output", str(output), "--dtype", "fp32", "--policy", str(policy)]


def test_an_engine_brings_its_policy(
    model_dir: Path, tmp_path: Path, own_registry: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = write_policy(tmp_path / "policy.json", model_dir), tmp_path / "engine"
    assert build(options(model_dir, output, path)) == 0
    assert manifests.load(output).limits.policy == "mine"
    del own_registry["mine"]  # another process, which never saw the file
    path.unlink()
    engine = load_engine(output, RuntimeConfig(kv_memory_bytes=64 << 20, num_threads=1))
    assert registry.get_policy("mine").budget_ratio == 0.2
    engine.submit(Request("a", "the quick brown fox " * 30, SamplingParams(max_tokens=4), "c"))
    busy = True
    while busy:
        _, busy = engine.step()
    assert engine.kv_stats("c").evicted > 200


def test_another_content_is_another_engine(
    model_dir: Path, tmp_path: Path, own_registry: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = write_policy(tmp_path / "policy.json", model_dir), tmp_path / "engine"
    assert build(options(model_dir, output, path)) == build(options(model_dir, output, path)) == 0
    assert "is up to date" in capsys.readouterr().out
    write_policy(path, model_dir, budget=0.4)
    del own_registry["mine"]
    assert build(options(model_dir, output, path)) == 0
    assert "built" in capsys.readouterr().out
    assert json.loads((output / POLICY_FILE).read_text(encoding="utf-8"))["changes"]["budget_ratio"] == 0.4


@pytest.mark.parametrize(
    ("model", "budget", "message"),
    [
        ({"num_layers": 3}, 0.2, "model.num_layers is 3, expected 2"),
        ({"name": "Other"}, 0.2, "model.name is 'Other'"),
        ({}, 0.0, "budget_ratio"),
        ({}, 1.5, "budget_ratio"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    model_dir: Path, tmp_path: Path, model: dict[str, Any], budget: float, message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = write_policy(tmp_path / "policy.json", model_dir, budget, **model)
    assert build(options(model_dir, tmp_path / "engine", path)) == 2
    assert message in capsys.readouterr().err
    assert build(options(model_dir, tmp_path / "engine", tmp_path / "absent.json")) == 2
    assert not (tmp_path / "engine").exists()
