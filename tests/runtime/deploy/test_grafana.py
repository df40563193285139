"""Every query of the dashboard names metrics, labels and label values that the server exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.serving.metric_table import ALL_METRICS, MetricSpec

DASHBOARD = Path(__file__).resolve().parents[3] / "runtime" / "deploy" / "grafana" / "commitkv.json"
# Prometheus puts `instance` and `job` on every series, Triton's adapter `model` and `version`, a histogram `le`.
COMMON_LABELS = {"instance", "job", "model", "version"}
FUNCTIONS = {"rate", "sum", "max", "avg", "by", "histogram_quantile", "label_values"}
SUFFIXES = ("_bucket", "_sum", "_count")


def series() -> dict[str, MetricSpec]:
    """What Prometheus will call each series of a family."""
    named = {}
    for spec in ALL_METRICS:
        for suffix in SUFFIXES if spec.kind == "histogram" else ("",):
            named[spec.name + suffix] = spec
    return named


def load() -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return dashboard


def panels() -> Iterator[dict[str, Any]]:
    for panel in load()["panels"]:
        yield panel
        yield from panel.get("panels", [])


def queries() -> list[tuple[str, str, str]]:
    """(title of the panel, expression, legend)."""
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in panels()
        for target in panel.get("targets", [])
    ]


def names_in(expression: str) -> set[str]:
    """Identifiers outside of selectors, groupings, ranges and strings."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|by \([^)]*\)", " ", expression)
    return set(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", bare)) - FUNCTIONS


def check(expression: str, legend: str = "") -> None:
    """Raises AssertionError for a name that is not exported."""
    known = series()
    names = names_in(expression)
    assert names, "no metric"
    for name in names:
        assert name in known, f"{name}: not exported"
    specs = [known[name] for name in names]
    labels = COMMON_LABELS | {spec.label for spec in specs} | ({"le"} if any(s.buckets for s in specs) else set())
    groupings = [label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")]
    shown = re.findall(r"\{\{(\w+)\}\}", legend)
    for label in groupings + shown:
        assert label in labels, f"{label}: no label of {names}"
    for name, selector in re.findall(r"(\w+)\{([^}]*)\}", expression):
        for label, value in re.findall(r'(\w+)=~?"([^"]*)"', selector):
            assert label in COMMON_LABELS | {known[name].label}, f"{label}: no label of {name}"
            assert label in COMMON_LABELS or value in known[name].values, f"{value}: no value of {name}'s {label}"


def test_the_dashboard_has_queries() -> None:
    assert len(queries()) > 40


@pytest.mark.parametrize(("title", "expression", "legend"), queries())
def test_a_query_names_what_is_exported(title: str, expression: str, legend: str) -> None:
    check(expression, legend)
    assert expression.count("(") == expression.count(")"), title
    for name in names_in(expression):
        counts = series()[name].kind != "gauge"
        assert counts == (f"rate({name}{{" in expression), f"{title}: {name} needs {'a' if counts else 'no'} rate"


@pytest.mark.parametrize(
    "wrong",
    [
        'sum(commitkv_commit_total{instance="x"})',
        'sum by (reason) (rate(commitkv_turns_total{instance="x"}[1m]))',
        'commitkv_kv_bytes{state="warm"}',
        "commitkv_turn_seconds",
        "vector(1)",
    ],
)
def test_wrong_queries_are_found(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check(wrong)


def test_every_family_is_shown_somewhere() -> None:
    known = series()
    shown = {known[name].name for _, expression, _ in queries() for name in names_in(expression)}
    hidden = {spec.name for spec in ALL_METRICS} - shown
    # Gauges under TensorRT-LLM's names that say again what ours say.
    assert hidden == {"nv_trt_llm_general_metrics"}


def test_the_servers_to_choose_from_come_from_an_exported_metric() -> None:
    [variable] = [v for v in load()["templating"]["list"] if v["name"] == "instance"]
    match = re.fullmatch(r"label_values\((\w+), instance\)", variable["query"]["query"])
    assert match is not None and match[1] in series()


def test_panels_have_their_own_ids_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
