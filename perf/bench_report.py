"""What `perf.bench` reports: rows, the arithmetic behind them, Markdown tables, plots."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 2**20
FIT_BYTES = 256 * MIB
FIT_TOKENS = 4096


@dataclass(frozen=True)
class Row:
    """One system at one context and batch.

    step_ms: median wall time of a decode step, one token for each of `batch` histories.   to_full: median over rounds
    of this over our engine's full cache, None without that row.   kv_bytes: of one history.   weight_bytes: that one
    step reads.   manager_ratio: the manager's share of the decode steps; commit_ratio: of one more turn, with the
    commit after it (at batch 1). None for systems without a manager.
    """

    system: str
    context: int
    batch: int
    step_ms: float
    to_full: float | None
    prefill_tokens_per_s: float | None
    kv_bytes: int
    weight_bytes: int
    manager_ratio: float | None = None
    commit_ratio: float | None = None
    only_attention: bool = False

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.batch / self.step_ms

    def floor_ms(self, bytes_per_s: float) -> float:
        """Milliseconds in which a step could read the weights once and the KV of every history."""
        return 1e3 * (self.weight_bytes + self.batch * self.kv_bytes) / bytes_per_s

    def distance(self, bytes_per_s: float) -> float:
        """How many times the floor it takes."""
        return self.step_ms / self.floor_ms(bytes_per_s)


@dataclass(frozen=True)
class Slope:
    """ms_per_1k: growth of a decode step per 1000 tokens of context; growth: longest context's time over the
    shortest's; to_full: the slope over the full cache's, None without it."""

    system: str
    batch: int
    ms_per_1k: float
    growth: float
    to_full: float | None


@dataclass(frozen=True)
class Machine:
    """read_gb_per_s: the best that was seen, since other work only takes from it.   load_before, load_after: the
    system's one-minute averages."""

    processor: str
    cores: int
    threads: int
    read_gb_per_s: float
    load_before: float
    load_after: float
    seconds: float


@dataclass(frozen=True)
class Report:
    engine: str
    machine: Machine
    rows: tuple[Row, ...]
    slopes: tuple[Slope, ...]
    fits: dict[str, int]
    skipped: tuple[str, ...]
    versions: dict[str, str]


def line_slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Slope of the least-squares line. `xs` hold at least two different values."""
    return statistics.linear_regression(xs, ys).slope


def ratio_of_rounds(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over rounds of ours / theirs: what a machine does to one round it does to both."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def slopes(rows: Sequence[Row], full: str) -> tuple[Slope, ...]:
    """One per system and batch that was measured at two contexts or more."""
    found: list[Slope] = []
    groups = {(row.batch, row.system): None for row in rows}
    whole: dict[int, float] = {}
    for batch, system in sorted(groups, key=lambda g: (g[0], g[1] != full)):
        points = sorted((r.context, r.step_ms) for r in rows if (r.batch, r.system) == (batch, system))
        if len(points) < 2:
            continue
        per_token = line_slope([c for c, _ in points], [ms for _, ms in points])
        if system == full:
            whole[batch] = per_token
        base = whole.get(batch, 0.0)
        growth = points[-1][1] / points[0][1]
        found.append(Slope(system, batch, 1e3 * per_token, growth, per_token / base if base > 0 else None))
    return tuple(found)


def fits(rows: Sequence[Row], context: int = FIT_TOKENS) -> dict[str, int]:
    """System -> conversations of `context` tokens that fit into 256 MiB, by the bytes that one held."""
    held = {row.system: row.kv_bytes for row in rows if row.context == context and not row.only_attention}
    return {system: FIT_BYTES // kv_bytes for system, kv_bytes in held.items()}


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def decode_table(rows: Sequence[Row], bytes_per_s: float) -> str:
    """Markdown."""
    lines = [
        "| context | batch | system | ms/step | x full | floor ms | x floor | tokens/s | prefill tokens/s "
        "| KV MiB each | manager | turn, commit |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda r: (r.context, r.batch)):
        cells = (
            str(row.context),
            str(row.batch),
            row.system,
            f"{row.step_ms:.1f}",
            "" if row.to_full is None else f"{row.to_full:.2f}",
            f"{row.floor_ms(bytes_per_s):.1f}",
            f"{row.distance(bytes_per_s):.1f}",
            f"{row.tokens_per_s:.0f}",
            "" if row.prefill_tokens_per_s is None else f"{row.prefill_tokens_per_s:.0f}",
            f"{row.kv_bytes / MIB:.1f}",
            _percent(row.manager_ratio),
            _percent(row.commit_ratio),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def slope_table(found: Sequence[Slope]) -> str:
    """Markdown."""
    lines = ["| batch | system | ms per 1,000 tokens | x full | longest / shortest |", "|---:|---|---:|---:|---:|"]
    for s in found:
        to_full = "" if s.to_full is None else f"{s.to_full:.2f}"
        lines.append(f"| {s.batch} | {s.system} | {s.ms_per_1k:.2f} | {to_full} | {s.growth:.2f} |")
    return "\n".join(lines)


def markdown(report: Report) -> str:
    """All tables, and what they were measured on."""
    m = report.machine
    parts = [
        f"{report.engine} on {m.processor}, {m.cores} cores, {m.threads} threads; read bandwidth "
        f"{m.read_gb_per_s:.1f} GB/s; load {m.load_before:.1f} before, {m.load_after:.1f} after; {m.seconds:.0f} s. "
        "Systems ran in turn in every round; medians. A step makes one token for each conversation of the batch.",
        decode_table(report.rows, 1e9 * m.read_gb_per_s),
        "Growth of a decode step with context:",
        slope_table(report.slopes),
    ]
    if report.fits:
        held = ", ".join(f"{system} {count}" for system, count in report.fits.items())
        parts.append(f"Conversations of {FIT_TOKENS} tokens in {FIT_BYTES // MIB} MiB of KV: {held}.")
    parts += [f"Not measured: {text}" for text in report.skipped]
    return "\n\n".join(parts)


def _draw(panel: Any, rows: Sequence[Row], unit: float, name: str) -> None:
    """One line per system."""
    for system in dict.fromkeys(row.system for row in rows):
        points = sorted((row.context, getattr(row, name) / unit) for row in rows if row.system == system)
        panel.plot([x for x, _ in points], [y for _, y in points], marker="o", label=system)
    panel.set_xlabel("tokens of context")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)


def plots(report: Report, directory: Path) -> list[Path]:
    """decode.png: ms per step over context, one panel per batch; memory.png: KV of one conversation over context."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    batches = sorted({row.batch for row in report.rows})
    figure, axes = pyplot.subplots(
        1, len(batches), figsize=(1 + 4.5 * len(batches), 4.5), layout="constrained", squeeze=False
    )
    for batch, panel in zip(batches, axes[0], strict=True):
        _draw(panel, [row for row in report.rows if row.batch == batch], 1.0, "step_ms")
        panel.set_title(f"batch {batch}")
        panel.set_ylabel("ms per decode step")
        panel.set_ylim(bottom=0)
    figure.savefig(directory / "decode.png", dpi=120)
    pyplot.close(figure)
    figure, panel = pyplot.subplots(figsize=(6, 4.5), layout="constrained")
    _draw(panel, [r for r in report.rows if r.batch == batches[0] and not r.only_attention], MIB, "kv_bytes")
    panel.set_ylabel("KV of one conversation, MiB")
    panel.set_ylim(bottom=0)
    figure.savefig(directory / "memory.png", dpi=120)
    pyplot.close(figure)
    return [directory / "decode.png", directory / "memory.png"]
