"""Keeps the server's metrics up to date, whatever server that is.

`Metrics` knows the table; an `Instrument` is how the server takes a value. Triton's are in model.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from runtime.request import FinishEvent
from runtime.serving.metric_table import (
    ALL_METRICS,
    ENGINE_METRICS,
    INTER_TOKEN,
    REFUSALS,
    TURN_METRICS,
    TURNS_NAME,
    MetricSpec,
    Reading,
    refusal_reason,
)


class Instrument(Protocol):
    """One metric with its labels, as the server keeps it; `pb_utils.Metric` is one."""

    def increment(self, value: float) -> None: ...

    def set(self, value: float) -> None: ...

    def observe(self, value: float) -> None: ...


MakeInstrument = Callable[[MetricSpec, Mapping[str, str]], Instrument]


class Metrics:
    """Every metric of the table with every label value, from the start, so that rates have a zero to begin at.

    Not thread-safe: one thread reports. A value that did not change is not sent again. Keeps `make`, which may own what
    the instruments belong to.
    """

    def __init__(self, make: MakeInstrument) -> None:
        self._make = make
        self._instruments = {
            (spec.name, value): make(spec, {spec.label: value} if spec.label else {})
            for spec in ALL_METRICS
            for value in spec.values
        }
        self._last: dict[tuple[str, str], float] = {}

    def read_engine(self, reading: Reading) -> None:
        """Brings gauges and the engine's counters up to date."""
        for metric in ENGINE_METRICS:
            for value, amount in metric.read(reading).items():
                key = (metric.spec.name, value)
                before = self._last.get(key)
                if metric.spec.kind == "gauge" and amount != before:
                    self._instruments[key].set(float(amount))
                elif metric.spec.kind == "counter" and amount > (before or 0.0):
                    self._instruments[key].increment(float(amount - (before or 0.0)))
                self._last[key] = amount

    def turn_ended(self, event: FinishEvent) -> None:
        for metric in TURN_METRICS:
            for value, amount in metric.read(event).items():
                instrument = self._instruments[metric.spec.name, value]
                if metric.spec.kind == "histogram":
                    instrument.observe(float(amount))
                elif amount:
                    instrument.increment(float(amount))

    def turn_failed(self) -> None:
        """A turn that had been accepted ended with an error."""
        self._instruments[TURNS_NAME, "error"].increment(1.0)

    def piece_gap(self, seconds: float) -> None:
        self._instruments[INTER_TOKEN.name, ""].observe(seconds)

    def refused(self, error: Exception) -> None:
        self._instruments[REFUSALS.name, refusal_reason(error)].increment(1.0)
