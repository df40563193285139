"""The command line: bad input gets one clear line, and nothing half-written stays behind."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from builder import build, engine_writer, trt_engine
from builder.default_model import default_gguf
from runtime import manifest
from runtime.errors import BuildError, CheckpointError
from runtime.policy.registry import ALL_POLICIES


@pytest.fixture
def model(save_tiny: Any, tmp_path: Path) -> Path:
    """A private copy of a tiny model, to damage."""
    import shutil

    directory, _ = save_tiny("llama")
    return Path(shutil.copytree(directory, tmp_path / "tiny"))


def run(model: Path, output: Path, *options: str) -> int:
    return build.main(["--model", str(model), "--output", str(output), *options])


def refused(capsys: pytest.CaptureFixture[str], model: Path, *options: str) -> str:
    """Build, expect refusal, return the one line of the error."""
    output = model.parent / "engine"
    before = sorted(os.listdir(model.parent))
    assert run(model, output, *options) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and not output.exists()
    assert sorted(os.listdir(model.parent)) == before
    return lines[0]


def edit_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_build_again_and_force(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "engine"
    assert run(model, output) == 0
    first = manifest.load(output, target="cpu")
    assert first.model.family == "llama" and first.limits.max_seq_len == 256 and first.source.kind == "huggingface"
    assert run(model, output) == 0
    assert "up to date" in capsys.readouterr().out
    inode = (output / manifest.WEIGHTS_FILE).stat().st_ino
    assert run(model, output, "--force") == 0
    assert (output / manifest.WEIGHTS_FILE).stat().st_ino != inode
    assert run(model, output, "--max-seq-len", "128") == 0
    assert manifest.load(output).limits.max_seq_len == 128
    (output / manifest.WEIGHTS_FILE).write_bytes(b"damaged")
    assert run(model, output, "--max-seq-len", "128") == 0
    manifest.load(output)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, model / "model.safetensors")
    assert run(model, output, "--max-seq-len", "128") == 0
    assert manifest.load(output).source != first.source
    assert sorted(os.listdir(tmp_path)) == ["engine", "tiny"]


def test_runs_as_a_script_from_anywhere(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(build.ROOT / "builder" / "build.py"), "--model", str(model), "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    fitting = {name: policy.gate is None for name, policy in ALL_POLICIES.items()}  # a scorer is one model's
    assert "weights" in done.stdout and {name: f"  {name} " in done.stdout for name in fitting} == fitting
    assert not (tmp_path / "engine").exists()
    command[-3:] = ["--model", "/does/not/exist"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: model: ") and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--target", "trt", "--sm", "75"), "sm: got 75, expected one of 80, 89, 90, 120 for --target trt"),
        (("--target", "trt-rtx", "--sm", "90"), "sm: got 90, expected one of 80, 86, 89, 120, 121"),
        (("--target", "trt-rtx", "--sm", "120", "--dtype", "fp32", "--dry-run"), "dtype: got fp32, expected fp16"),
        (("--target", "trt-rtx", "--sm", "120", "--kv-dtype", "fp32", "--dry-run"), "kv_dtype: got fp32"),
        (("--target", "trt-rtx", "--sm", "120", "--weight-dtype", "int8", "--dry-run"), "weight_dtype: got int8"),
        (("--target", "trt-rtx", "--sm", "120", "--max-step-tokens", "3", "--dry-run"), "max_step_tokens: got 3"),
        (("--target", "trt", "--sm", "90", "--dry-run"), "head_dim: got 16"),
        (("--policy", "magic"), "policy: got 'magic', expected one of"),
        (("--max-seq-len", "257"), "max_seq_len: got 257, expected at most 256"),
        (("--max-seq-len", "0"), "max_seq_len: got 0"),
        (("--max-batch-size", "0"), "max_batch_size: got 0"),
        (("--max-batch-size", "100000"), "max_batch_size: got 100000"),
        (("--page-tokens", "12"), "page_tokens: got 12, expected a multiple of 8"),
        (("--block-entries", "-8"), "block_entries: got -8"),
        (("--kv-memory", "lots", "--dry-run"), "kv-memory: got 'lots'"),
        (("--tokenizer", "/does/not/exist"), "tokenizer: /does/not/exist is no directory"),
    ],
)
def test_bad_options(model: Path, capsys: Any, options: tuple[str, ...], reason: str) -> None:
    assert reason in refused(capsys, model, *options)


def damage_truncate(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def damage_header(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])


def change_weights(edit: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(model: Path) -> None:
        weights = load_file(model / "model.safetensors")
        edit(weights)
        save_file(weights, model / "model.safetensors")

    return apply


def change_config(**changes: Any) -> Callable[[Path], None]:
    return lambda model: edit_config(model, **changes)


_NAN = {"model.norm.weight": torch.full((96,), float("nan"))}
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (damage_truncate, "truncated or damaged safetensors"),
    "header": (damage_header, "truncated or damaged safetensors"),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), "model.safetensors is missing"),
    "no config": (lambda m: (m / "config.json").unlink(), "config.json is missing"),
    "bad config": (lambda m: (m / "config.json").write_text("{"), "config.json is damaged"),
    "no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "bad tokenizer": (lambda m: (m / "tokenizer.json").write_text("{}"), "damaged tokenizer"),
    "tensor missing": (change_weights(lambda w: w.pop("model.norm.weight")), "tensor model.norm.weight is missing"),
    "wrong shape": (change_config(intermediate_size=64), "mlp.gate_proj.weight has shape [128, 96], expected [64, 96]"),
    "not finite": (change_weights(lambda w: w.update(_NAN)), "holds infinite or undefined numbers"),
    "integers": (change_weights(lambda w: w.update({"model.norm.weight": torch.ones(96).int()})), "is I32, expected"),
    "architecture": (change_config(model_type="gpt2"), "model_type 'gpt2', expected one of llama"),
    "rope": (change_config(rope_parameters={"rope_type": "longrope", "factor": 2.0}), "rope type 'longrope'"),
    "old rope": (change_config(rope_parameters=None, rope_scaling={"type": "dynamic", "factor": 2}), "'dynamic'"),
    "rope factor": (change_config(rope_parameters={"rope_type": "yarn", "factor": 0.5}), "a factor of at least 1"),
    "partial rope": (change_config(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "gelu": (change_config(hidden_act="gelu"), "hidden_act is gelu, expected silu"),
    "bias": (change_config(attention_bias=True), "attention_bias is True"),
    "absurd layers": (change_config(num_hidden_layers=2**70), "expected 1 to 10,000"),
    "eps is text": (change_config(rms_norm_eps="tiny"), "a value of an unexpected kind"),
    "infinite eps": (change_config(rms_norm_eps=float("inf")), "rms epsilon is inf, expected a finite number"),
    "theta": (change_config(rope_parameters={"rope_type": "default", "rope_theta": -1.0}), "rope theta is -1.0"),
    "rope number": (change_config(rope_parameters={"rope_type": "yarn", "factor": []}), "with factor []"),
    "zero layers": (change_config(num_hidden_layers=0), "num_hidden_layers is 0"),
    "odd groups": (change_config(num_key_value_heads=4), "6 query heads over 4 KV heads"),
    "vocabulary": (change_config(vocab_size=290), "embed_tokens.weight has shape [300, 96], expected [290, 96]"),
    "eos outside": (change_config(eos_token_id=999), "names token 999"),
    "window": (change_config(model_type="mistral", sliding_window=64), "slides over 64 tokens"),
    "qwen2 window": (change_config(model_type="qwen2", use_sliding_window=True, sliding_window=64), "slides over 64"),
    "quantized": (change_config(quantization_config={"bits": 4}), "quantization_config"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_models(model: Path, capsys: Any, name: str) -> None:
    damage, reason = DAMAGE[name]
    damage(model)
    assert reason in refused(capsys, model)


def test_window_as_long_as_the_engine_is_fine(model: Path, tmp_path: Path) -> None:
    edit_config(model, model_type="mistral", sliding_window=64)
    assert run(model, tmp_path / "engine", "--max-seq-len", "64") == 0


def test_sharded_equals_single(model: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(model, tmp_path / "a") == 0
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(weights)
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in set(where.values()):
        save_file({name: weights[name] for name in names if where[name] == shard}, model / shard)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert run(model, tmp_path / "b") == 0
    files = [tmp_path / side / manifest.WEIGHTS_FILE for side in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()
    (model / "model-00002-of-00002.safetensors").unlink()
    assert run(model, tmp_path / "c") == 2
    assert "model-00002-of-00002.safetensors is missing" in capsys.readouterr().err


def test_full_disk_leaves_the_old_engine(
    model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "engine"
    assert run(model, output) == 0
    old = manifest.load(output)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("_put", "_write_text", "write"):
        with monkeypatch.context() as patch:
            patch.setattr(engine_writer, name, fail)
            assert run(model, output, "--force") == 2
        assert "no room left" in capsys.readouterr().err
        assert sorted(os.listdir(tmp_path)) == ["engine", "tiny"]
        assert manifest.load(output) == old


def test_failed_rename_puts_the_old_engine_back(
    model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "engine"
    assert run(model, output) == 0
    old = manifest.load(output)
    rename = Path.rename

    def fail_second(self: Path, target: Path) -> Path:
        if ".building-" in self.name:
            raise OSError(errno.EIO, "broken disk")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_second)
    assert run(model, output, "--force") == 2
    assert "cannot write" in capsys.readouterr().err
    assert manifest.load(output) == old and sorted(os.listdir(tmp_path)) == ["engine", "tiny"]


def test_never_replaces_what_is_no_engine(model: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "precious"
    output.mkdir()
    (output / "thesis.txt").write_text("years of work")
    assert run(model, output) == 2
    assert "is no engine directory" in capsys.readouterr().err
    assert (output / "thesis.txt").read_text() == "years of work"


def test_a_model_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be kept there"):
        default_gguf(tmp_path / "taken" / "models")


TRT = ("--target", "trt-rtx", "--sm", "120", "--max-seq-len", "128", "--max-batch-size", "2", "--max-step-tokens", "32")


class FakePlan:
    """What TensorRT gives back, without its time: the real builds are in test_lower_trt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.content: bytes | None = b"plan"
        self.num_builds = 0
        monkeypatch.setattr(trt_engine, "build_plan", self.build)

    def build(self, *_: object) -> bytes:
        self.num_builds += 1
        if self.content is None:
            raise BuildError("tensorrt_rtx: built no engine: no reason")
        return self.content


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> FakePlan:
    pytest.importorskip("tensorrt_rtx")
    return FakePlan(monkeypatch)


def test_gpu_engine_is_built_once(plan: FakePlan, model: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "engine"
    assert run(model, output, *TRT) == 0 and run(model, output, *TRT) == 0
    assert plan.num_builds == 1 and "up to date" in capsys.readouterr().out
    first = manifest.load(output, target="trt-rtx", sm=120)
    assert first.trt is not None and first.trt.step.max_step_tokens == 32 and not first.has_file(manifest.WEIGHTS_FILE)
    for changes in (("--sm", "89"), ("--dtype", "fp16"), ("--max-step-tokens", "64"), ("--policy", "quantize-int8")):
        assert run(model, output, *TRT, *changes) == 0
    assert plan.num_builds == 5
    assert run(model, output, *TRT[4:]) == 0, "a CPU engine replaces it"
    assert manifest.load(output, target="cpu").trt is None and not (output / manifest.PLAN_FILE).exists()


def test_failed_gpu_build_leaves_the_old_engine(plan: FakePlan, model: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "engine"
    assert run(model, output, *TRT) == 0
    old = manifest.load(output)
    plan.content = None
    assert run(model, output, *TRT, "--force") == 2
    assert "built no engine: no reason" in capsys.readouterr().err
    assert manifest.load(output) == old and sorted(os.listdir(tmp_path)) == ["engine", "tiny"]


def test_target_trt_says_what_is_missing(model: Path, capsys: Any) -> None:
    if importlib.util.find_spec("tensorrt") is not None:
        pytest.skip("TensorRT is installed")
    message = refused(capsys, model, "--target", "trt")
    for part in (
        "module tensorrt of package tensorrt-cu13 11.x is not installed",
        "looked in",
        "pip install '.[h100]'",
    ):
        assert part in message


@pytest.mark.parametrize("target", ["trt", "trt-rtx"])
def test_dry_run_of_a_gpu_engine(target: str, save_tiny: Any, tmp_path: Path, capsys: Any) -> None:
    directory, _ = save_tiny("llama", head_dim=64)
    assert run(directory, tmp_path / "engine", "--target", target, "--dry-run") == 0
    assert "in bf16" in capsys.readouterr().out and not (tmp_path / "engine").exists()
