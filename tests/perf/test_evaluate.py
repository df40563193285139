"""The evaluation: tasks are what they say, scores are what their definitions give, and a run measures real bytes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import runtime.policy.registry as registry
from perf.evaluate import Answers, main, score, table, varied
from perf.tasks import NUM_FACTS, NUM_UPDATES, make_task
from runtime.policy.base import Schedule


def answers(logits: list[list[float]], kv_bytes: int = 100) -> Answers:
    logprobs = torch.log_softmax(torch.tensor(logits), dim=1)
    return Answers(logprobs, torch.tensor([[0, 1, 2, 3]] * len(logits)), kv_bytes, 400, 10, 1.0)


def test_tasks_are_seeded_and_answerable() -> None:
    task = make_task(5, NUM_FACTS + NUM_UPDATES + 1)
    assert task == make_task(5, NUM_FACTS + NUM_UPDATES + 1) != make_task(6, NUM_FACTS + NUM_UPDATES + 1)
    assert len(task.questions) == 2 * NUM_FACTS + NUM_UPDATES
    text = " ".join(task.turns)
    for question in task.questions:
        gold = question.choices[0]
        assert (
            f"{question.opening} {gold}" in text
            or f"{question.opening[0].lower()}{question.opening[1:]} {gold}" in text
        )
        assert len(set(question.choices)) == 4
        assert f"{question.opening[:6]}" and gold in task.turns[question.told]


def test_scores_by_hand() -> None:
    full = [answers([[2.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])]
    same = score("same", full, full)
    assert (same.kl, same.same_word, same.accuracy, same.kv_share) == (0.0, 1.0, 0.5, 0.25)
    flat = score("flat", [answers([[0.0] * 4] * 2)], full)
    expected = torch.tensor([[2.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]).softmax(1)
    kl = (expected * (expected.log() - torch.tensor(0.25).log())).sum(1).mean()
    assert flat.kl == pytest.approx(kl.item(), abs=1e-6)
    assert flat.nll == pytest.approx(torch.log(torch.tensor(4.0)).item(), abs=1e-6)
    assert "| flat | 0.250 |" in table([flat])


def test_a_run_measures_bytes(tiny_engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Schedule(min_tokens=200, recent_tokens=64)
    for name in ("commitkv", "quantize-int8"):
        policy = dataclasses.replace(registry.ALL_POLICIES[name], schedule=schedule)
        monkeypatch.setitem(registry.ALL_POLICIES, name, policy)
    arguments = ["--engine", str(tiny_engine_dir), "--conversations", "1", "--turns", "3", "--output", str(tmp_path)]
    assert main([*arguments, "--policies", "commitkv,quantize-int8"]) == 0
    full, ours, int8 = json.loads((tmp_path / "quality.json").read_text(encoding="utf-8"))
    assert full["kl"] == 0.0 and full["same_word"] == 1.0
    assert ours["kv_share"] < int8["kv_share"] < full["kv_share"]
    assert 0 <= int8["kl"] < ours["kl"]
    assert (tmp_path / "quality.png").stat().st_size > 1000


def test_variants_are_named_after_their_changes() -> None:
    base = registry.ALL_POLICIES["commitkv"]
    policy = varied(base, ["absorb_gate=null", "budget_ratio=0.5"])
    assert (policy.absorb_gate, policy.budget_ratio) == (None, 0.5)
    assert policy.name == "commitkv absorb_gate=null budget_ratio=0.5"
    assert varied(base, []) is base


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "magic"], "magic"),
        (["--turns", "0"], "--turns"),
        (["--set", "magic=1"], "magic"),
        (["--set", "budget_ratio=2"], "budget_ratio"),
        (["--set", 'budget_ratio="much"'], "budget_ratio"),
        (["--set", "budget_ratio=much"], "JSON"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
