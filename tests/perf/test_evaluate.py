"""The evaluation's command line: a run measures real bytes and goes on where it stopped; bad arguments are named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import runtime.policy.registry as registry
from perf.evaluate import chosen_policies, main, make_parser, make_tasks, stored_scores, varied
from perf.evaluation import hold
from runtime.policy.base import Schedule


@pytest.fixture
def small_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Schedule(min_tokens=200, recent_tokens=64)
    for name in ("commitkv", "quantize-int8"):
        policy = dataclasses.replace(registry.ALL_POLICIES[name], schedule=schedule)
        monkeypatch.setitem(registry.ALL_POLICIES, name, policy)


@pytest.mark.usefixtures("small_schedule")
def test_a_run_measures_bytes_and_goes_on(
    evaluation_engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--engine", str(evaluation_engine_dir), "--contexts", "700", "--questions", "40"]
    arguments += ["--output", str(tmp_path)]
    assert main([*arguments, "--policies", "commitkv"]) == 0
    held: list[tuple[int, str]] = []
    original = hold.EngineHolder.hold

    def counted(self: hold.EngineHolder, task: hold.Task, policy: str) -> hold.Raw:
        held.append((task.seed, policy))
        return original(self, task, policy)

    monkeypatch.setattr(hold.EngineHolder, "hold", counted)
    assert main([*arguments, "--policies", "commitkv,quantize-int8"]) == 0
    assert held == [(0, "quantize-int8"), (1, "quantize-int8")]
    full, ours, int8 = json.loads((tmp_path / "quality.json").read_text(encoding="utf-8"))["scores"]
    assert full["kl"]["value"] == 0.0 and full["equivalent"]["value"] == 1.0
    assert ours["kv_share"] < int8["kv_share"] < full["kv_share"]
    assert 0 <= int8["kl"]["value"] < ours["kl"]["value"]
    assert full["questions"] == ours["questions"] >= 40

    store = hold.Store.open(tmp_path)
    partly = hold.Store(tmp_path / "partly", "key")
    tasks = make_tasks("700", 40, 8192)
    for name, some in (("full", tasks), ("quantize-int8", tasks), ("commitkv", tasks[:1])):
        for one in store.of(name, some):
            partly.put(one)
    full_again, int8_again, some_of_ours = stored_scores(partly, tasks, ("full", "quantize-int8"))
    assert [json.loads(json.dumps(dataclasses.asdict(s))) for s in (full_again, int8_again)] == [full, int8]
    assert some_of_ours.policy == "commitkv" and some_of_ours.questions == len(tasks[0].questions) < 40


def test_variants_are_named_after_their_changes() -> None:
    base = registry.ALL_POLICIES["commitkv"]
    policy = varied(base, ["absorb_gate=null", "budget_ratio=0.5"])
    assert (policy.absorb_gate, policy.budget_ratio) == (None, 0.5)
    assert policy.name == "commitkv absorb_gate=null budget_ratio=0.5"
    assert varied(base, []) is base


def test_budgets_are_points_of_policies_that_have_one() -> None:
    args = make_parser().parse_args(["--policies", "full,commitkv,quantize-int8", "--budgets", "0.5,0.2"])
    names = [policy.name for policy in chosen_policies(args)]
    assert names == ["commitkv budget_ratio=0.5", "commitkv budget_ratio=0.2", "quantize-int8"]


def test_enough_tasks_for_the_questions() -> None:
    made = make_tasks("700,1300", 100, 8192)
    for length in (700, 1300):
        asked = [len(task.questions) for task in made if task.num_tokens == length]
        assert sum(asked) >= 100 > sum(asked[:-1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "magic"], "magic"),
        (["--contexts", "100"], "--contexts"),
        (["--contexts", "99999"], "--contexts"),
        (["--contexts", "long"], "--contexts"),
        (["--questions", "0"], "--questions"),
        (["--kv-mib", "0"], "--kv-mib"),
        (["--budgets", "much"], "--budgets"),
        (["--budgets", "2"], "budget_ratio"),
        (["--set", "magic=1"], "magic"),
        (["--set", "budget_ratio=2"], "budget_ratio"),
        (["--set", 'budget_ratio="much"'], "budget_ratio"),
        (["--set", "budget_ratio=much"], "JSON"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, tmp_path: Path, evaluation_engine_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--engine", str(evaluation_engine_dir), "--output", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_results_of_another_engine_are_refused(
    evaluation_engine_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key.txt").write_text("another engine", encoding="utf-8")
    assert main(["--engine", str(evaluation_engine_dir), "--output", str(tmp_path)]) == 2
    assert "another engine" in capsys.readouterr().err
