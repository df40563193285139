import csv
import json
from pathlib import Path

from perf.load.outcomes import Bound, RunRecord, Sample, TurnOutcome, summarize
from perf.load.report import markdown, plot, write_figures, write_run


def run_of(label: str, held: int, ttft_s: float) -> RunRecord:
    turns = tuple(
        TurnOutcome("s", n, "agent", "ok", 10.0 + n, 10.0 + n, 10.0 + n + ttft_s, 12.0 + n, (0.05, 0.0625))
        for n in range(4)
    )
    samples = tuple(Sample(10.0 + n, 6, held, 1, 0, held << 20, n, n, 1 << 30) for n in range(4))
    return RunRecord(label, "abc", 10.0, 20.0, turns, samples)


RUNS = (run_of("full", 2, 3.0), run_of("commitkv", 6, 0.5))
BOUND = Bound(2.0, 0.25)
SUMMARIES = [summarize(run, BOUND) for run in RUNS]


def test_the_table_sets_two_runs_side_by_side() -> None:
    table = markdown(SUMMARIES, "6 sessions")
    lines = table.split("\n")
    assert lines[0] == "| 6 sessions | full | commitkv | ratio |" and lines[1] == "|---|---:|---:|---:|"
    assert "| conversations held, mean | 2.0 of 6 | 6.0 of 6 | 3.00 |" in lines
    assert "| goodput, turns/s | 0.000 | 0.400 | first is 0 |" in lines
    assert "| time to first token p50 / p95 / p99, ms | 3000 / 3000 / 3000 | 500 / 500 / 500 | 0.17 (p95) |" in lines
    assert len({line.count("|") for line in lines}) == 1


def test_one_run_has_no_ratio() -> None:
    lines = markdown(SUMMARIES[:1], "x").split("\n")
    assert len({line.count("|") for line in lines}) == 1 and "ratio" not in lines[0]


def test_every_turn_and_sample_is_a_row(tmp_path: Path) -> None:
    turns, samples = write_run(tmp_path, run_of("tenant/../a b", 2, 0.5))
    assert turns.parent == tmp_path == samples.parent
    rows = list(csv.DictReader(turns.open(encoding="utf-8")))
    assert [row["number"] for row in rows] == ["0", "1", "2", "3"] and rows[0]["gaps_s"] == "0.0500 0.0625"
    assert [row["held"] for row in csv.DictReader(samples.open(encoding="utf-8"))] == ["2"] * 4


def test_figures_and_plot_are_written(tmp_path: Path) -> None:
    write_figures(tmp_path / "r.json", SUMMARIES, {"kv_mib": 5})
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert report["settings"] == {"kv_mib": 5}
    assert [run["ttft_ms"]["p95"] for run in report["runs"]] == [3000.0, 500.0]
    plot(tmp_path / "r.png", RUNS, BOUND)
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
