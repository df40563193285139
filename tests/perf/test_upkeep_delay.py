"""Delays by idle work are measured on a real engine; bad arguments are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import upkeep_delay


def test_requests_and_pauses_are_timed(evaluation_engine_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--engine", str(evaluation_engine_dir), "--context", "1200", "--requests", "3", "--turns", "2"]
    assert upkeep_delay.main([*arguments, "--threads", "1"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    times = {row[0].strip("| "): (int(row[1]), float(row[2])) for row in rows if row[1].isdigit()}
    assert sum(times[name][0] for name in ("probe", "commit") if name in times) == 3
    for name in (upkeep_delay.FULL, upkeep_delay.BETWEEN, upkeep_delay.ASIDE):
        count, median_ms = times[name]
        assert count == 2 and median_ms > 0


@pytest.mark.parametrize("option", ["context", "requests", "turns", "kv-mib"])
def test_nothing_cannot_be_measured(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert upkeep_delay.main([f"--{option}", "0"]) == 2
    assert f"--{option}: got 0, expected at least 1" in capsys.readouterr().err
