"""The demo's report: figures of two runs as JSON, a table, a picture and a page that holds both."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perf.workload import Conversation, Run, TurnRecord

MIB = 2**20


@dataclass(frozen=True)
class DemoFacts:
    """What the runs had in common."""

    model: str
    server_version: str
    think_s: float


def run_figures(run: Run) -> dict[str, Any]:
    """The figures of one run; kv_bytes_by_turn is what the conversation held after each turn's think time."""
    asked = [record.right for record in run.records if record.right is not None]
    return {
        "policy": run.policy,
        "kv_bytes_end": run.records[-1].kv.kv_bytes,
        "kv_bytes_peak": run.records[-1].peak_kv_bytes,
        "kv_bytes_by_turn": [record.kv.kv_bytes for record in run.records],
        "kv_bytes_at_answer_by_turn": [record.kv_at_answer.kv_bytes for record in run.records],
        "kv_full_bytes_end": run.records[-1].kv.kv_full_bytes,
        "ms_per_token_by_turn": [record.result.ms_per_token for record in run.records],
        "first_token_ms_by_turn": [first_token_ms(record) for record in run.records],
        "think_s_by_turn": [round(record.think_s, 2) for record in run.records],
        "facts_asked": len(asked),
        "facts_right": sum(asked),
        "manager_time_ratio": run.times.manager_ratio,
        "probe_time_ms": run.times.probe_ms,
        "execute_time_ms": run.times.execute_ms,
        "rss_bytes_end": run.process["rss_bytes"],
        "rss_bytes_peak": run.process["peak_rss_bytes"],
        "answers": [record.result.text for record in run.records],
    }


def first_token_ms(record: TurnRecord) -> float:
    """From the turn's arrival at the engine to its first token."""
    turn = record.result.stats["turn"]
    return float(turn["first_token_ns"] - turn["arrival_ns"]) / 1e6


def last_quarter_ms_per_token(run: Run) -> float:
    """Decode time over decoded tokens, all turns of the last quarter together."""
    last = run.records[-max(1, len(run.records) // 4) :]
    tokens = sum(max(0, record.result.generated_tokens - 1) for record in last)
    return sum(record.result.decode_ms for record in last if record.result.generated_tokens > 1) / max(1, tokens)


def build_report(full: Run, commitkv: Run, facts: DemoFacts) -> dict[str, Any]:
    """The content of report.json; ratios are commitkv / full."""
    ours, whole = run_figures(commitkv), run_figures(full)
    same = [a == b for a, b in zip(ours["answers"], whole["answers"], strict=True)]
    full_ms = last_quarter_ms_per_token(full)
    return {
        "model": facts.model,
        "turns": len(full.records),
        "tokens": full.tokens,
        "full": whole,
        "commitkv": ours,
        "kv_bytes_ratio_end": ours["kv_bytes_end"] / whole["kv_bytes_end"],
        "kv_bytes_ratio_peak": ours["kv_bytes_peak"] / whole["kv_bytes_peak"],
        "ms_per_token_ratio_last_quarter": last_quarter_ms_per_token(commitkv) / full_ms if full_ms else None,
        "same_answer_ratio": sum(same) / len(same),
        "server_version": facts.server_version,
        "policy": commitkv.policy,
        "think_s": facts.think_s,
    }


def table(full: Run, commitkv: Run) -> str:
    """One line per turn: KV bytes, share, milliseconds per token, both answers."""
    lines = [
        f"{'turn':>4} {'full MiB':>9} {'ours MiB':>9} {'share':>6} {'full ms':>8} {'ours ms':>8}  answers (full / ours)"
    ]
    for number, (a, b) in enumerate(zip(full.records, commitkv.records, strict=True), 1):
        share = b.kv.kv_bytes / a.kv.kv_bytes
        lines.append(
            f"{number:>4} {a.kv.kv_bytes / MIB:>9.2f} {b.kv.kv_bytes / MIB:>9.2f} {share:>6.0%} "
            f"{_ms(a):>8} {_ms(b):>8}  {_mark(a)}{_short(a.result.text)} / {_mark(b)}{_short(b.result.text)}"
        )
    return "\n".join(lines)


def summary(report: Mapping[str, Any]) -> str:
    """The figures that matter, a few lines."""
    full, ours = report["full"], report["commitkv"]
    speed = report["ms_per_token_ratio_last_quarter"]
    return "\n".join(
        [
            f"{report['model']}, {report['turns']} turns, {report['tokens']} tokens, Triton {report['server_version']}",
            f"KV at the end   {ours['kv_bytes_end'] / MIB:.2f} of {full['kv_bytes_end'] / MIB:.2f} MiB "
            f"({report['kv_bytes_ratio_end']:.1%})",
            f"KV at the peak  {ours['kv_bytes_peak'] / MIB:.2f} of {full['kv_bytes_peak'] / MIB:.2f} MiB "
            f"({report['kv_bytes_ratio_peak']:.1%})",
            f"resident memory {ours['rss_bytes_end'] / MIB:.0f} against {full['rss_bytes_end'] / MIB:.0f} MiB "
            "(model included)",
            f"ms per token    x{speed:.2f} in the last quarter of the turns"
            if speed
            else "ms per token    too few tokens",
            f"facts right     {ours['facts_right']} of {ours['facts_asked']}, full cache {full['facts_right']}",
            f"same answers    {report['same_answer_ratio']:.0%} of the turns",
            f"manager's share {ours['manager_time_ratio']:.1%} of the busy time (probes ran in think time: "
            f"{ours['probe_time_ms'] / 1000:.1f} s)",
        ]
    )


def _ms(record: TurnRecord) -> str:
    value = record.result.ms_per_token
    return "-" if value is None else f"{value:.0f}"


def _mark(record: TurnRecord) -> str:
    return "" if record.right is None else ("[right] " if record.right else "[wrong] ")


def _short(text: str, num_chars: int = 44) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= num_chars else flat[: num_chars - 3] + "..."


def picture(report: Mapping[str, Any]) -> bytes:
    """PNG: KV bytes and milliseconds per token over the turns."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    turns = range(1, report["turns"] + 1)
    for name, colour in (("full", "#8a8f98"), ("commitkv", "#1668c4")):
        run = report[name]
        left.plot(turns, [x / MIB for x in run["kv_bytes_by_turn"]], color=colour, label=name, linewidth=2)
        points = [(t, ms) for t, ms in zip(turns, run["ms_per_token_by_turn"], strict=True) if ms is not None]
        right.plot(*zip(*points, strict=True), color=colour, label=name, linewidth=2, marker="o", markersize=3)
    left.set(title="KV cache of the conversation", xlabel="turn", ylabel="MiB")
    right.set(title="decode time", xlabel="turn", ylabel="ms per token")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    plt.close(figure)
    return buffer.getvalue()


_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem;color:#1c1f24}
img{width:100%}pre{background:#f4f5f7;padding:1rem;overflow-x:auto}table{border-collapse:collapse;width:100%}
td,th{border-bottom:1px solid #ddd;padding:.35rem .6rem;text-align:left;vertical-align:top}
.right{background:#e7f5ea}.wrong{background:#fbeaea}summary{cursor:pointer;color:#555}"""


def page(report: Mapping[str, Any], runs: Sequence[Run], conversation: Conversation, png: bytes) -> str:
    """One self-contained HTML page."""
    rows = []
    for number, turn in enumerate(conversation.turns):
        cells = "".join(_answer_cell(run.records[number]) for run in runs)
        text, start = html.escape(turn.text), html.escape(_short(turn.text, 90))
        question = f"<details><summary>{start}</summary><pre>{text}</pre></details>"
        rows.append(f"<tr><td>{number + 1}</td><td>{question}</td>{cells}</tr>")
    head = "".join(f"<th>{html.escape(run.policy)}</th>" for run in runs)
    image = base64.b64encode(png).decode("ascii")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>CommitKV demo</title><style>{_STYLE}</style>'
        f"<h1>CommitKV demo: {html.escape(conversation.name)}</h1><pre>{html.escape(summary(report))}</pre>"
        f'<img alt="KV bytes and milliseconds per token over the turns" src="data:image/png;base64,{image}">'
        f"<p>Both runs are greedy. After each turn the client waits until the engine is idle, "
        f"{report['think_s']:g} s at most, as an agent's tools or a reading user would.</p>"
        f"<table><tr><th>turn</th><th>user</th>{head}</tr>{''.join(rows)}</table></html>\n"
    )


def _answer_cell(record: TurnRecord) -> str:
    kind = "" if record.right is None else (' class="right"' if record.right else ' class="wrong"')
    figures = f"{record.kv.kv_bytes / MIB:.2f} MiB, {_ms(record)} ms/token"
    return f"<td{kind}>{html.escape(record.result.text)}<br><small>{figures}</small></td>"
