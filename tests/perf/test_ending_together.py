"""Turns that end together are timed on a real engine; bad arguments are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import ending_together
from perf.ending_together import Round, table
from runtime import maintenance


def test_both_kinds_of_batches_are_timed(evaluation_engine_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--engine", str(evaluation_engine_dir), "--context", "300", "--conversations", "3", "--rounds", "1"]
    most = maintenance.MOST_COMMITS
    assert ending_together.main([*arguments, "--threads", "1", "--kv-mib", "256"]) == 0
    assert most == maintenance.MOST_COMMITS
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    figures = {row[0]: [float(value) for value in row[1:3]] for row in rows[1:]}
    assert rows[0][:3] == ["3 turns end together", "one by one", f"at once, up to {most}"]
    assert all(value > 0 for value in figures["commits per second"] + figures["longest step, ms"])
    assert figures["step boundaries"][1] <= figures["step boundaries"][0]


def test_the_table_compares_medians() -> None:
    rounds = [Round(0.5, (10.0, 30.0, 20.0), 10.0), Round(0.1, (10.0,), 10.0), Round(0.2, (10.0, 20.0), 10.0)]
    text = table({1: rounds, 8: rounds[1:2]}, 2)
    assert "| commits per second | 10.0 | 20.0 | 2.00 |" in text
    assert "| step boundaries | 2.0 | 1.0 | 0.50 |" in text
    assert "| lost by the answer per commit, ms | 5.0 | 0.0 | 0.00 |" in text


@pytest.mark.parametrize("option", ["context", "conversations", "rounds", "kv-mib"])
def test_nothing_cannot_be_measured(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ending_together.main([f"--{option}", "0"]) == 2
    assert f"--{option}: got 0, expected at least" in capsys.readouterr().err


def test_a_policy_that_probes_is_refused(evaluation_engine_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ending_together.main(["--engine", str(evaluation_engine_dir), "--policy", "commitkv"]) == 2
    assert "expected one that does not" in capsys.readouterr().err
