"""What `perf.load` writes: a row per turn and per sample (CSV), figures (JSON), a table (Markdown), plots (PNG)."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from perf.load.outcomes import Bound, Quantiles, RunRecord, Sample, Summary, TurnOutcome

MIB = 2**20
Cell = Callable[[Summary], str]


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _quantiles(values: Quantiles) -> str:
    return f"{_ms(values.p50)} / {_ms(values.p95)} / {_ms(values.p99)}"


ROWS: Sequence[tuple[str, Cell]] = (
    ("conversations held, mean", lambda s: f"{s.held:.1f} of {s.sessions_open}"),
    ("goodput, turns/s", lambda s: f"{s.goodput:.3f}"),
    ("good turns of those due", lambda s: f"{s.turns_good} of {s.turns_due} ({s.good_share:.0%})"),
    ("time to first token p50 / p95 / p99, ms", lambda s: _quantiles(s.ttft_ms)),
    ("between tokens p50 / p95 / p99, ms", lambda s: _quantiles(s.itl_ms)),
    ("whole turn p50 / p95 / p99, ms", lambda s: _quantiles(s.turn_ms)),
    ("generated tokens/s", lambda s: f"{s.generated_tokens_per_s:.1f}"),
    ("tokens of lost caches computed again", lambda s: f"{s.recomputed_tokens}"),
    ("KV mean / peak, MiB", lambda s: f"{s.kv_mib:.0f} / {s.kv_mib_peak:.0f}"),
    ("commits / probes per s", lambda s: f"{s.commits_per_s:.2f} / {s.probes_per_s:.2f}"),
)


def markdown(summaries: Sequence[Summary], head: str) -> str:
    """One column per run, and of two runs the second over the first where both count the same thing."""
    two = len(summaries) == 2
    lines = [
        f"| {head} | {' | '.join(s.label for s in summaries)} |{' ratio |' if two else ''}",
        "|---|" + "---:|" * (len(summaries) + two),
    ]
    for name, cell in ROWS:
        ratio = f" {_ratio(name, summaries[0], summaries[1])} |" if two else ""
        lines.append(f"| {name} | {' | '.join(cell(s) for s in summaries)} |{ratio}")
    return "\n".join(lines)


def _ratio(name: str, first: Summary, second: Summary) -> str:
    pairs: Mapping[str, tuple[float | None, float | None]] = {
        "conversations held, mean": (first.held, second.held),
        "goodput, turns/s": (first.goodput, second.goodput),
        "time to first token p50 / p95 / p99, ms": (first.ttft_ms.p95, second.ttft_ms.p95),
        "between tokens p50 / p95 / p99, ms": (first.itl_ms.p95, second.itl_ms.p95),
        "generated tokens/s": (first.generated_tokens_per_s, second.generated_tokens_per_s),
    }
    before, after = pairs.get(name, (None, None))
    if after is None or before is None:
        return ""
    suffix = " (p95)" if "p95" in name else ""
    return f"{after / before:.2f}{suffix}" if before > 0 else "first is 0"


def write_run(output: Path, run: RunRecord) -> list[Path]:
    """turns-LABEL.csv and samples-LABEL.csv."""
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in run.label)
    turns, samples = output / f"turns-{name}.csv", output / f"samples-{name}.csv"
    rows = [{**asdict(turn), "gaps_s": " ".join(f"{gap:.4f}" for gap in turn.gaps_s)} for turn in run.turns]
    _write_csv(turns, [field.name for field in fields(TurnOutcome)], rows)
    _write_csv(samples, [field.name for field in fields(Sample)], [asdict(sample) for sample in run.samples])
    return [turns, samples]


def _write_csv(path: Path, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def write_figures(path: Path, summaries: Sequence[Summary], settings: Mapping[str, Any]) -> None:
    """{"settings", "runs"} as JSON."""
    report = {"settings": dict(settings), "runs": [asdict(summary) for summary in summaries]}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def plot(path: Path, runs: Sequence[RunRecord], bound: Bound) -> None:
    """Four panels over time and over turns: conversations held, KV, good turns so far, times to the first token."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    held, kv, good, first = figure.subplots(2, 2).flat
    for run in runs:
        at_s = [sample.at_s for sample in run.samples]
        held.plot(at_s, [sample.held for sample in run.samples], drawstyle="steps-post", label=run.label)
        kv.plot(at_s, [sample.kv_bytes / MIB for sample in run.samples], label=run.label)
        ends = sorted(turn.end_s for turn in run.turns if bound.good(turn))
        good.step([0.0, *ends], range(len(ends) + 1), where="post", label=run.label)
        waits = sorted(turn.ttft_s for turn in run.turns if turn.ttft_s is not None)
        if waits:
            first.step(waits, [(n + 1) / len(waits) for n in range(len(waits))], where="post", label=run.label)
    for axes, title, x_label in (
        (held, "conversations whose whole history is cached", "s"),
        (kv, "KV bytes, MiB", "s"),
        (good, f"good turns so far (first token within {bound.ttft_s:g} s)", "s"),
        (first, "share of answered turns by time to first token", "s"),
    ):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(x_label)
        axes.grid(alpha=0.3)
        axes.legend()
    for axes in (held, kv, good):
        axes.axvline(runs[0].ramp_s, color="gray", linestyle=":")
    first.set_xscale("log")
    first.axvline(bound.ttft_s, color="gray", linestyle=":")
    figure.savefig(path, dpi=110)
