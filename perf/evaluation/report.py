"""Scores as JSON, Markdown tables, curves and one HTML page."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from jinja2 import Environment

from perf.evaluation.scores import Mean, Score

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>CommitKV: quality against bytes</title>
<style>
 body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
 table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
 th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right }
 th:first-child, td:first-child { text-align: left } img { max-width: 100% }
</style>
<h1>Quality against bytes</h1>
<p>{{ title }}. KV bytes are shares of the full cache in fp16, everything counted. Errors are standard errors over
conversations. Equivalent: KL at most 0.1 and the same choice as the full cache.</p>
<img alt="KL to the full cache over KV bytes" src="data:image/png;base64,{{ picture }}">
{% for length, scores in lengths %}
<h2>{{ "{:,}".format(length) }} tokens</h2>
<table><tr>{% for name in header %}<th>{{ name }}</th>{% endfor %}</tr>
{% for score in scores %}<tr>{% for cell in cells(score) %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table>
{% for part, title in (("by_kind", "Accuracy (mean KL) by kind of question"), ("by_age", "By age of what is asked")) %}
<details><summary>{{ title }}</summary><table>
<tr><th>policy</th>{% for name in names(scores, part) %}<th>{{ name }}</th>{% endfor %}</tr>
{% for score in scores %}<tr><td>{{ score.policy }}</td>{% for name in names(scores, part) %}
<td>{{ pair(score, part, name) }}</td>{% endfor %}</tr>{% endfor %}</table></details>
{% endfor %}{% endfor %}
</html>
"""

HEADER = (
    "policy", "KV bytes", "accuracy", "change", "NLL", "KL to full", "worst KL", "same word", "equivalent", "questions",
)  # fmt: skip


def cells(score: Score) -> tuple[str, ...]:
    """One row of the main table."""
    return (
        score.policy,
        f"{score.kv_share:.3f}",
        _with_error(score.accuracy, 3),
        _with_error(score.accuracy_change, 3, sign="+"),
        _with_error(score.nll, 2),
        _with_error(score.kl, 3),
        f"{score.worst_kl:.2f}",
        _with_error(score.same_word, 2),
        _with_error(score.equivalent, 3),
        str(score.questions),
    )


def _with_error(mean: Mean, digits: int, sign: str = "") -> str:
    error = "" if math.isnan(mean.error) else f" ± {mean.error:.{digits}f}"  # of one conversation there is none
    return f"{mean.value:{sign}.{digits}f}{error}"


def by_length(scores: Sequence[Score]) -> list[tuple[int, list[Score]]]:
    ordered = sorted(scores, key=lambda s: s.num_tokens)
    return [(length, list(group)) for length, group in groupby(ordered, key=lambda s: s.num_tokens)]


def markdown(scores: Sequence[Score]) -> str:
    """A table per context length."""
    parts = []
    for length, group in by_length(scores):
        tokens = sum(s.tokens for s in group) / len(group)
        lines = [f"{length:,} tokens aimed at, {tokens:,.0f} on average:", ""]
        lines += ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
        lines += ["| " + " | ".join(cells(score)) + " |" for score in group]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def picture(scores: Sequence[Score]) -> bytes:
    """PNG: KL to the full cache, and the share of turns that are not equivalent, over bytes; a column per length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = by_length(scores)
    figure, axes = pyplot.subplots(2, len(lengths), figsize=(5 * len(lengths), 7), squeeze=False, layout="constrained")
    families = list(dict.fromkeys(family(s.policy) for s in scores))
    colors = dict(zip(families, pyplot.colormaps["tab20"].colors, strict=False))  # type: ignore[attr-defined]
    for column, (length, group) in enumerate(lengths):
        for name in families:
            points = sorted((s for s in group if family(s.policy) == name), key=lambda s: s.kv_share)
            if not points or name == "full":
                continue
            shares = [s.kv_share for s in points]
            style = {"fmt": "o-", "capsize": 3, "color": colors[name], "label": name, "markersize": 4}
            axes[0][column].errorbar(shares, [s.kl.value for s in points], yerr=[s.kl.error for s in points], **style)
            missed = [1 - s.equivalent.value for s in points]
            axes[1][column].errorbar(shares, missed, yerr=[s.equivalent.error for s in points], **style)
        axes[0][column].set(title=f"{length:,} tokens", ylabel="KL to the full cache, nats", yscale="log")
        axes[1][column].set(xlabel="KV bytes / full cache in fp16", ylabel="turns not equivalent")
        for row in axes:
            row[column].set_xlim(left=0)
            row[column].grid(alpha=0.3)
    axes[0][-1].legend(fontsize=7, loc="upper right")
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, format="png")
    pyplot.close(figure)
    return buffer.getvalue()


def family(policy: str) -> str:
    """Variants of a policy ("commitkv budget_ratio=0.2") are points of one curve."""
    return policy.split(" ")[0]


def write(scores: Sequence[Score], folder: Path, title: str) -> None:
    """quality.json, quality.md, quality.png and index.html."""
    image = picture(scores)
    (folder / "quality.png").write_bytes(image)
    records = {"title": title, "scores": [dataclasses.asdict(s) for s in scores]}
    (folder / "quality.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    (folder / "quality.md").write_text(f"{title}\n\n{markdown(scores)}\n", encoding="utf-8")
    page = Environment(autoescape=True).from_string(_PAGE).render(
        title=title, picture=base64.b64encode(image).decode(), lengths=by_length(scores), header=HEADER, cells=cells,
        names=_names, pair=_pair,
    )  # fmt: skip
    (folder / "index.html").write_text(page, encoding="utf-8")


def _names(scores: Sequence[Score], part: str) -> list[str]:
    return list(dict.fromkeys(name for score in scores for name in getattr(score, part)))


def _pair(score: Score, part: str, name: str) -> str:
    values = getattr(score, part).get(name)
    return "" if values is None else f"{values[0]:.2f} ({values[1]:.3f})"
