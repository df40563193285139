"""Kernel measurements as Markdown tables and as JSON under perf/results."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.kernel_runs import TOLERANCE, AttendRow, CommitRow
from runtime.gpu_facts import GpuFacts

ATTEND_BAR, COMMIT_BAR = 0.85, 0.70
BAR_TOKENS = 1 << 16  # of active KV in flight, from which the bar of attention counts
MOST_DIFFERENT = 1e-3


@dataclass(frozen=True)
class Session:
    """One card's results.   copy and read: its own bandwidth, bytes per second.   versions: (package, version)."""

    card: GpuFacts
    sm: str
    copy_bytes_per_s: float
    read_bytes_per_s: float
    versions: tuple[tuple[str, str], ...]
    attend: tuple[AttendRow, ...]
    commit: tuple[CommitRow, ...]

    @property
    def wrong(self) -> list[str]:
        """Shapes whose results are not those of the reference."""
        far = [row.shape.label for row in self.attend if not row.error <= TOLERANCE]
        return far + [row.shape.label for row in self.commit if not row.difference <= MOST_DIFFERENT]


def bandwidth_share(num_bytes: int, seconds: float, bytes_per_s: float) -> float:
    return num_bytes / seconds / bytes_per_s


def tables(session: Session) -> str:
    """Everything measured, as Markdown."""
    card, copy = session.card, session.copy_bytes_per_s
    lines = [
        f"{card.name}, {session.sm}, driver {card.driver}; copy {copy / 1e9:.0f} GB/s (read and written), read "
        f"{session.read_bytes_per_s / 1e9:.0f} GB/s; {', '.join(' '.join(v) for v in session.versions)}",
        "",
        "| attend, one layer | us | GB/s | share of copy | SDPA us | FlashInfer us | cp.async us | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in session.attend:
        share = bandwidth_share(row.shape.kv_bytes, row.seconds, copy)
        cells = (row.shape.label, _us(row.seconds), f"{row.shape.kv_bytes / row.seconds / 1e9:.0f}", f"{share:.0%}",
                 _us(row.sdpa_s), _us(row.flashinfer_s), _us(row.plain_copies_s), f"{row.error:.1e}")  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "| commit, one layer | us | GB/s | share of copy | cp.async us | different |",
        "|---|---|---|---|---|---|",
    ]
    for commit in session.commit:
        share = bandwidth_share(commit.shape.kv_bytes, commit.seconds, copy)
        rate = f"{commit.shape.kv_bytes / commit.seconds / 1e9:.0f}"
        lines.append("| " + " | ".join((commit.shape.label, _us(commit.seconds), rate, f"{share:.0%}",
                                        _us(commit.plain_copies_s), f"{commit.difference:.1e}")) + " |")  # fmt: skip
    return "\n".join([*lines, "", *bars(session)])


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"


def bars(session: Session) -> list[str]:
    """The two bars and how far they were reached."""
    copy = session.copy_bytes_per_s
    long = [row for row in session.attend if row.shape.batch * row.shape.active_tokens >= BAR_TOKENS]
    attend = [bandwidth_share(row.shape.kv_bytes, row.seconds, copy) for row in long]
    commit = [bandwidth_share(row.shape.kv_bytes, row.seconds, copy) for row in session.commit]
    named = (
        (f"attend, from {BAR_TOKENS // 1024}k active tokens in flight", attend, ATTEND_BAR),
        ("commit", commit, COMMIT_BAR),
    )
    lines = []
    for name, shares, bar in named:
        if shares:
            reached = sum(share >= bar for share in shares)
            lines.append(
                f"{name}: {min(shares):.0%} to {max(shares):.0%} of the measured copy bandwidth; {reached} of "
                f"{len(shares)} shapes reach {bar:.0%}"
            )
    return lines


def write(session: Session, folder: Path) -> tuple[Path, Path]:
    """`<card>.json` and `<card>.md` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^a-z0-9]+", "-", session.card.name.lower()).strip("-")
    data, page = folder / f"{stem}.json", folder / f"{stem}.md"
    data.write_text(json.dumps(as_json(session), indent=1) + "\n", encoding="utf-8")
    page.write_text(tables(session) + "\n", encoding="utf-8")
    return data, page


def as_json(session: Session) -> dict[str, Any]:
    """Rows with the bytes that their shape must move."""
    result = dataclasses.asdict(session)
    for key, rows in (("attend", session.attend), ("commit", session.commit)):
        result[key] = [_row(row) for row in rows]
    return result


def _row(row: AttendRow | CommitRow) -> dict[str, Any]:
    return {**dataclasses.asdict(row), "kv_bytes": row.shape.kv_bytes, "label": row.shape.label}
