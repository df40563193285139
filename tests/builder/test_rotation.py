"""Values kept rotated: a step computes what it did, four bits lose less, and what was trained on values still fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from builder import build
from builder.lower_torch import load_decoder
from perf.train_parts import Tracer
from plugins.commit.gate import gate_logits
from runtime import gates, manifest
from runtime.errors import ConfigError
from runtime.manifest import WEIGHTS_FILE
from runtime.rotation import hadamard, is_rotatable

TOKENS = [(7 * i * i + 3 * i + 11) % 256 for i in range(60)]


@pytest.mark.parametrize("size", [1, 2, 16, 64, 128])
def test_hadamard_is_symmetric_and_orthonormal(size: int) -> None:
    matrix = hadamard(size)
    torch.testing.assert_close(matrix @ matrix, torch.eye(size))
    assert torch.equal(matrix, matrix.T) and is_rotatable(size) and not is_rotatable(3 * size)


def engine(model: Path, output: Path, *options: str) -> Any:
    assert build.main(["--model", str(model), "--output", str(output), *options]) == 0
    record = manifest.load(output, target="cpu")
    return load_decoder(output / WEIGHTS_FILE, record.model, record.limits.dtype)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_step_computes_what_it_did(family: str, save_tiny: Any, run_decoder: Any, tmp_path: Path) -> None:
    """qwen2's V has a bias, which is rotated too."""
    directory, model = save_tiny(family, head_dim=16)
    with torch.inference_mode():
        if family == "qwen2":
            assert model.model.layers[0].self_attn.v_proj.bias.abs().max() > 0
        expected = model(torch.tensor([TOKENS])).logits[0]
    decoder = engine(directory, tmp_path / "rotated", "--dtype", "fp32", "--rotate-values")
    got = run_decoder(decoder, TOKENS)
    assert float((got - expected).norm() / expected.norm()) < 1e-4


def test_weights_and_manifest_say_so(save_tiny: Any, tmp_path: Path) -> None:
    directory, _ = save_tiny("llama", head_dim=16)
    for name, options in (("plain", ()), ("rotated", ("--rotate-values",))):
        engine(directory, tmp_path / name, "--dtype", "fp32", *options)
    plain, rotated = (load_file(tmp_path / name / WEIGHTS_FILE) for name in ("plain", "rotated"))
    changed = {name for name in plain if not torch.equal(plain[name], rotated[name])}
    assert {name.split(".")[-2] for name in changed} == {"qkv", "output"}
    qkv = next(name for name in changed if "qkv" in name)
    record = manifest.load(tmp_path / "rotated")
    q_and_k = (record.model.num_q_heads + record.model.num_kv_heads) * record.model.head_dim
    assert torch.equal(plain[qkv][:q_and_k], rotated[qkv][:q_and_k])
    v = plain[qkv][q_and_k:].view(record.model.num_kv_heads, record.model.head_dim, -1)
    torch.testing.assert_close(rotated[qkv][q_and_k:].view_as(v), hadamard(16) @ v)
    assert record.limits.rotate_values and not manifest.load(tmp_path / "plain").limits.rotate_values


def test_training_asks_for_values_as_they_are(save_tiny: Any, tmp_path: Path) -> None:
    directory, _ = save_tiny("llama", head_dim=16)
    engine(directory, tmp_path / "rotated", "--dtype", "fp32", "--rotate-values")
    with pytest.raises(ConfigError, match="keeps values rotated, expected one as the model has them"):
        Tracer(tmp_path / "rotated", 16)


def test_heads_without_a_rotation_are_refused(
    save_tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _ = save_tiny("qwen3", head_dim=24)
    output = tmp_path / "engine"
    assert build.main(["--model", str(directory), "--output", str(output), "--rotate-values"]) == 2
    assert "heads of 24 channels, expected a power of two" in capsys.readouterr().err and not output.exists()


def test_trained_weights_follow_the_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scorer gives rotated values the scores of the values; a merging network turns its hidden layer likewise."""
    g = torch.Generator().manual_seed(5)
    size, rows = 16, 3
    monkeypatch.setattr(gates, "GATES_DIR", tmp_path)
    save_file(
        {"weight": torch.randn(rows, 2 * size + 1, generator=g), "bias": torch.randn(rows, generator=g)},
        tmp_path / "gate",
    )
    kv, positions = torch.randn(rows, 7, 2, size, generator=g), torch.arange(7)
    turned = torch.stack([kv[:, :, 0], kv[:, :, 1] @ hadamard(size)], dim=2)
    cpu = torch.device("cpu")
    expected = gate_logits(kv, positions, gates.load_gate("gate", cpu))
    torch.testing.assert_close(gate_logits(turned, positions, gates.load_gate("gate", cpu, rotated=True)), expected)
    hidden = torch.randn(rows, 2 * size + 1, 4, generator=g)
    others = {name: torch.randn(rows, 4, generator=g) for name in ("offset", "out")}
    save_file({"hidden": hidden, "score": torch.randn(rows, generator=g), **others}, tmp_path / "merge")
    x = torch.randn(rows, 7, 2 * size + 1, generator=g)
    x_turned = torch.cat([x[..., :size], x[..., size:-1] @ hadamard(size), x[..., -1:]], dim=-1)
    plain, rotated = (gates.load_merger("merge", cpu, rotated=rotated).hidden for rotated in (False, True))
    torch.testing.assert_close(x_turned @ rotated, x @ plain)
