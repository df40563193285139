"""Choices, one changed at a time: all are taken by name, a run measures them, the table says what they are about."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import runtime.policy.registry as registry
from perf import choices
from runtime.policy.base import Schedule


def test_every_choice_changes_the_policy_and_nothing_is_measured_twice() -> None:
    base = registry.ALL_POLICIES["commitkv"]
    measured = choices.variants(base, 30)
    assert len(measured) == 1 + sum(len(choice.settings) for choice in choices.CHOICES) + len(choices.LAYER_SLOPES)
    unnamed = [dataclasses.replace(policy, name="") for policy, _, _ in measured.values()]
    assert len(set(unnamed)) == len(unnamed)


def test_a_run_prints_what_a_change_is_about(
    evaluation_engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = Schedule(min_tokens=200, recent_tokens=64)
    small = dataclasses.replace(registry.ALL_POLICIES["commitkv"], schedule=schedule)
    monkeypatch.setitem(registry.ALL_POLICIES, "commitkv", small)
    kinds = (
        choices.Choice("budget", ("budget_ratio=0.6", "budget_ratio=0.1")),
        choices.Choice("what fell", ("absorb_gate=null",)),
    )
    monkeypatch.setattr(choices, "CHOICES", kinds)
    monkeypatch.setattr(choices, "LAYER_SLOPES", ())
    arguments = ["--engine", str(evaluation_engine_dir), "--contexts", "700", "--questions", "20"]
    assert choices.main([*arguments, "--output", str(tmp_path)]) == 0
    rows = [line.split(" | ")[:2] for line in (tmp_path / "choices.md").read_text(encoding="utf-8").splitlines()[2:]]
    changed = ["nothing", "`budget_ratio=0.6`", "`budget_ratio=0.1`", "`absorb_gate=null`"]
    assert rows == [
        [about, change] for about, change in zip(["| ", "| budget", "| ", "| what fell"], changed, strict=True)
    ]
    assert (tmp_path / "choices.md").read_text(encoding="utf-8").strip() in capsys.readouterr().out
    _, shipped, more, less, _ = json.loads((tmp_path / "choices.json").read_text(encoding="utf-8"))["scores"]
    assert less["kv_share"] < shipped["kv_share"] < more["kv_share"]
    assert less["kl"]["value"] > more["kl"]["value"]


def test_an_unknown_policy_is_refused(capsys: pytest.CaptureFixture[str], evaluation_engine_dir: Path) -> None:
    assert choices.main(["--engine", str(evaluation_engine_dir), "--policy", "best"]) == 2
    assert "policy: got 'best', expected one of" in capsys.readouterr().err
