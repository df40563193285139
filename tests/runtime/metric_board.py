"""Metrics kept in memory, as `runtime.serving.metrics` reports them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from runtime.serving.metric_table import MetricSpec


@dataclass
class Series:
    """One instrument; `calls` counts what reached it."""

    kind: str
    value: float = 0.0
    seen: list[float] = field(default_factory=list)
    calls: int = 0

    def increment(self, value: float) -> None:
        assert self.kind == "counter" and value > 0
        self.value += value
        self.calls += 1

    def set(self, value: float) -> None:
        assert self.kind == "gauge"
        self.value = value
        self.calls += 1

    def observe(self, value: float) -> None:
        assert self.kind == "histogram" and value >= 0
        self.seen.append(value)
        self.calls += 1


class Board:
    """Keeps every series by its name and label value."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, str], Series] = {}

    def __call__(self, spec: MetricSpec, labels: Mapping[str, str]) -> Series:
        assert len(labels) <= 1
        key = (spec.name, next(iter(labels.values()), ""))
        assert key not in self.series
        return self.series.setdefault(key, Series(spec.kind))

    def __getitem__(self, key: tuple[str, str]) -> float:
        return self.series[key].value
