"""Calibration: the texts are the same under every policy, the knee is the knee, the file is taken by an engine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from perf.calibrate import Point, best_of_budgets, knee, main
from perf.chat_data import Chat, ChatTurn
from perf.teacher import Said, Teacher, compare
from runtime import manifest as manifests
from runtime.config import RuntimeConfig
from runtime.errors import RequestError
from runtime.policy import policy_file, registry
from runtime.policy.policy_file import load_policy
from runtime.wiring import load_engine

CONFIG = RuntimeConfig(kv_memory_bytes=64 << 20, num_threads=1)


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies of this process stay of this test, and commitkv begins soon enough for short conversations."""
    known = dict(registry.ALL_POLICIES)
    base = known["commitkv"]
    schedule = dataclasses.replace(base.schedule, min_tokens=200, recent_tokens=64)
    known["commitkv"] = dataclasses.replace(base, schedule=schedule)
    monkeypatch.setattr(registry, "ALL_POLICIES", known)
    monkeypatch.setattr(policy_file, "ALL_POLICIES", known)
    monkeypatch.setattr("perf.calibrate.ALL_POLICIES", known)


def chat(num_turns: int = 5, answer: str | None = None) -> Chat:
    turns = (f"Turn {i}: the quick brown fox number {i} jumps over the lazy dog. " * 2 for i in range(num_turns))
    return Chat("talk", "Be brief.", tuple(ChatTurn(text, answer, f"x, line {i + 1}") for i, text in enumerate(turns)))


def test_the_words_are_the_full_caches_and_the_scores_fall_with_the_budget(tiny_engine_dir: Path) -> None:
    teacher = Teacher(tiny_engine_dir, CONFIG, answer_tokens=6)
    reference = teacher.refer(chat())
    assert [len(said.tokens) for said in reference.said] == [6] * 5
    assert torch.stack([said.logprobs for said in reference.said]).exp().sum(2).allclose(torch.ones(5, 6))
    again = teacher.tell(chat(), "full", reference)
    assert again.scores == () and again.kv.evicted == 0
    int8 = teacher.tell(chat(), "quantize-int8", reference)
    assert int8.scores == ()  # its schedule waits for more tokens
    ours = teacher.tell(chat(), "commitkv", reference)
    assert len(ours.scores) == 3 and ours.kv.evicted > 0
    assert all(score.kl > 0 for score in ours.scores)
    assert ours.kv.active + ours.kv.committed + ours.kv.evicted == reference.kv.active


def test_given_answers_are_held(tiny_engine_dir: Path) -> None:
    teacher = Teacher(tiny_engine_dir, CONFIG, answer_tokens=4)
    reference = teacher.refer(chat(2, "Certainly not."))
    tokens = teacher._tokenizer.encode("Certainly not.", (0, 0))[0][:4]
    assert [said.tokens for said in reference.said] == [tuple(tokens)] * 2


def test_scores_of_an_answer() -> None:
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    q = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    full, ours = Said((0, 0), p, True), Said((0, 0), q, True)
    found = compare(ours, full)
    expected = (0.5 * torch.log(torch.tensor(2.0)) + 0.5 * torch.log(torch.tensor(2 / 3))) / 2
    assert found.kl == pytest.approx(float(expected), abs=1e-6)
    assert not found.same_choice and compare(full, full).same_choice and compare(full, full).kl == 0.0


def point(budget: float, share: float, kl: float, threshold: float | None = 0.35) -> Point:
    return Point(budget, threshold, share, kl, 0.0, 1.0, 1.0, kl, 10)


def test_the_knee_is_the_last_point_before_divergence_takes_off() -> None:
    points = [point(b, b, 0.001 / b if b >= 0.2 else 0.5 / b) for b in (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)]
    assert knee(best_of_budgets(points)).budget == 0.2
    straight = [point(b, b, 1.0 - b) for b in (0.1, 0.2, 0.3)]
    assert knee(best_of_budgets(straight)).budget == 0.3
    flat = [point(0.1, 0.1, 0.01), point(0.2, 0.2, 0.01), point(0.3, 0.3, 0.02)]
    assert knee(best_of_budgets(flat)).budget == 0.1  # no better anywhere: the cheapest


def test_of_a_budget_the_better_threshold_counts() -> None:
    points = [point(0.2, 0.21, 0.05, None), point(0.2, 0.20, 0.03), point(0.4, 0.4, 0.01, None), point(0.4, 0.39, 0.02)]
    curve = best_of_budgets(points)
    assert [(p.budget, p.threshold) for p in curve] == [(0.4, None), (0.2, 0.35)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "talk.jsonl"
    lines = [{"role": "user", "content": turn.user} for turn in chat().turns]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def arguments(engine: Path, data: Path, tmp_path: Path, *more: str) -> list[str]:
    return [
        "--engine", str(engine), "--data", str(data), "--output", str(tmp_path / "out"), "--kv-mib", "64",
        "--threads", "1", "--answer-tokens", "3", *more,
    ]  # fmt: skip


def test_a_run_writes_a_policy_that_engines_take(
    tiny_engine_dir: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--budgets", "0.1,0.3,0.6", "--thresholds", "none,0.35", "--name", "mine"]
    assert main(arguments(tiny_engine_dir, data, tmp_path, *more)) == 0
    shown = capsys.readouterr().out
    assert shown.count("chosen") == 1 and shown.count("| 0.35 |") == shown.count("| none |") == 3
    record = json.loads((tmp_path / "out" / "calibration.json").read_text(encoding="utf-8"))
    assert len(record["points"]) == 6 and all(p["turns"] == 3 for p in record["points"])
    by_budget = {p["budget"]: p for p in record["points"] if p["threshold"] is None}
    assert by_budget[0.1]["kl"] > by_budget[0.6]["kl"] > 0
    assert by_budget[0.1]["kv_share"] < by_budget[0.6]["kv_share"]
    assert (tmp_path / "out" / "calibration.png").stat().st_size > 1000
    model = manifests.load(tiny_engine_dir, verify=False).model
    policy = load_policy(tmp_path / "out" / "policy.json", model)
    assert (policy.name, policy.budget_ratio, policy.absorb_gate) == (
        "mine", record["point"]["budget"], record["point"]["threshold"],
    )  # fmt: skip
    teacher = Teacher(tiny_engine_dir, CONFIG, 3)
    assert teacher.tell(chat(), "mine", teacher.refer(chat())).kv.evicted > 0


def test_a_budget_of_ones_own(tiny_engine_dir: Path, data: Path, tmp_path: Path) -> None:
    more = ["--budgets", "0.1,0.3,0.6", "--budget", "0.6"]
    assert main(arguments(tiny_engine_dir, data, tmp_path, *more)) == 0
    record = json.loads((tmp_path / "out" / "policy.json").read_text(encoding="utf-8"))
    assert record["changes"]["budget_ratio"] == 0.6 and record["calibration"]["point"]["kl_error"] is None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--budgets", "0,0.2,0.3"], "--budgets: got '0,0.2,0.3'"),
        (["--budgets", "0.1,0.2,1.5"], "--budgets"),
        (["--budgets", "0.1,0.1,0.2"], "--budgets"),
        (["--budgets", "much"], "--budgets"),
        (["--budgets", "0.1,0.2"], "at least 3"),
        (["--budget", "0.123"], "--budget: got 0.123"),
        (["--thresholds", "none,none"], "--thresholds"),
        (["--thresholds", "-1"], "--thresholds"),
        (["--policy", "full"], "--policy: got full"),
        (["--policy", "quantize-int8"], "--policy: got quantize-int8"),
        (["--policy", "magic"], "magic"),
        (["--policy", "pyramidkv-pooled"], "--policy: got pyramidkv-pooled"),
        (["--name", "full"], "--name: got 'full'"),
        (["--name", "My Name"], "name: got 'My Name"),
        (["--answer-tokens", "0"], "--answer-tokens"),
        (["--engine", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_arguments(
    tiny_engine_dir: Path, data: Path, tmp_path: Path, more: list[str], message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert main(arguments(tiny_engine_dir, data, tmp_path, *more)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_conversations_too_long_or_too_short_are_refused(
    tiny_engine_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "talk.jsonl"
    for lengths, message in (([100, 3000, 2000], f"{path}, line 3: "), ([50, 50], "longer conversations")):
        lines = [{"role": "user", "content": "x" * length} for length in lengths]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        assert main(arguments(tiny_engine_dir, path, tmp_path, "--budgets", "0.1,0.2,0.3")) == 2
        assert message in capsys.readouterr().err


def test_a_turn_that_does_not_fit_names_its_line(tiny_engine_dir: Path) -> None:
    teacher = Teacher(tiny_engine_dir, CONFIG, 4)
    turns = [ChatTurn("x" * 2030, None, f"x, line {i}") for i in (1, 2)]
    with pytest.raises(RequestError, match="x, line 2"):
        teacher.refer(Chat("long", None, tuple(turns)))
    assert len(teacher.refer(chat(1)).said) == 1  # the engine goes on


def test_an_engine_goes_on_with_its_own_policies(tiny_engine_dir: Path) -> None:
    engine: Any = load_engine(tiny_engine_dir, CONFIG, verify=False)
    assert engine._executor.steer is None
