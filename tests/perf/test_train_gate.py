"""The gate's training: labels are a line's, what can be learned is learned, and a run writes weights that load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from perf.train_gate import HOLDOUT_RUN, Samples, Trace, judge, main, make_samples, train
from runtime import gates


def trace(num_tokens: int, seed: int) -> Trace:
    """2 rows. Row 0's scores follow the key's first channel, row 1's are noise and small."""
    gen = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, num_tokens, 2, 4, generator=gen)
    scores = torch.stack((kv[0, :, 0, 0].sigmoid(), 0.1 * torch.rand(num_tokens, generator=gen)))
    return Trace(kv.half(), torch.arange(num_tokens), scores)


def test_labels_are_the_best_of_each_conversation_over_all_rows() -> None:
    samples = make_samples([trace(200, 1), trace(100, 2)], keep=0.25)
    assert samples.labels.shape == (2, 300)
    for part in (slice(0, 200), slice(200, 300)):
        assert int(samples.labels[:, part].sum()) == round(0.25 * samples.labels[:, part].numel())
    assert not samples.labels[1].any(), "small scores lose to the other row's"
    runs = samples.held_out.nonzero()[:, 0] // HOLDOUT_RUN
    assert set(runs.tolist()) == {4}


def test_what_can_be_told_is_learned() -> None:
    samples = make_samples([trace(2000, 3)], keep=0.25)
    found = judge(samples, train(samples, steps=200, decay=1e-4))
    assert found.auc > 0.97
    assert found.kept[0] == pytest.approx(0.25, abs=0.05) and found.kept[1] < found.kept[0]
    assert found.recall[0] > 0.85
    shuffled = Samples(samples.kv, samples.positions, samples.labels[:, torch.randperm(2000)], samples.held_out)
    assert judge(shuffled, train(shuffled, steps=50, decay=1e-4)).auc < 0.7


def test_scaling_goes_into_the_weights() -> None:
    """Features of other sizes give the same scorer in effect."""
    samples = make_samples([trace(1000, 4)], keep=0.25)
    scale = torch.tensor([8.0, 0.25, 1.0, 2.0]).half()
    scaled = Samples(samples.kv * scale, samples.positions, samples.labels, samples.held_out)
    a, b = (judge(s, train(s, steps=100, decay=1e-4)) for s in (samples, scaled))
    assert a.auc == pytest.approx(b.auc, abs=0.01)


def test_a_run_writes_weights_that_load(
    tiny_engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = tmp_path / "talk.jsonl", tmp_path / "gate.safetensors"
    lines = [{"role": "user", "content": f"Turn {i}. " + "Some words about trains and towns. " * 8} for i in range(4)]
    data.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    arguments = ["--engine", str(tiny_engine_dir), "--data", str(data), "--steps", "20", "--max-tokens", "4"]
    assert main([*arguments, "--output", str(output)]) == 0
    assert "held-out AUC" in capsys.readouterr().out
    monkeypatch.setattr(gates, "GATES_DIR", tmp_path)
    weights = gates.load_gate(output.name, torch.device("cpu"))
    assert weights.weight.shape == (4, 2 * 16 + 1) and weights.bias.shape == (4,)
    with safe_open(output, framework="pt") as file:
        facts = file.metadata()
    assert facts["layers"] == "2" and facts["kv_heads"] == "2" and int(facts["tokens"]) > 500


@pytest.mark.parametrize(("arguments", "message"), [
    (["--keep", "1.5"], "--keep"),
    (["--steps", "0"], "--steps"),
    (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
])  # fmt: skip
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
