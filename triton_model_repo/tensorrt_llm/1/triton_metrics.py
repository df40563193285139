"""Triton's side of the metrics: a family per name of the table, a metric per label value."""

import logging

import triton_python_backend_utils as pb_utils

from runtime.serving.metrics import Metrics

log = logging.getLogger(__name__)


def triton_metrics(model, version):
    """Metrics on Triton's own endpoint; None where it was started with `--allow-metrics=false`."""
    try:
        return Metrics(_Families({"model": model, "version": version}))
    except pb_utils.TritonModelException as error:
        log.warning("no metrics are exported: %s", error)
        return None


class _Families:
    """`runtime.serving.metrics.MakeInstrument`. Triton wants families to outlive their metrics, so they are kept."""

    def __init__(self, labels):
        self._labels = labels
        self._families = {}

    def __call__(self, spec, labels):
        if spec.name not in self._families:
            kind = getattr(pb_utils.MetricFamily, spec.kind.upper())
            self._families[spec.name] = pb_utils.MetricFamily(name=spec.name, description=spec.help, kind=kind)
        family = self._families[spec.name]
        all_labels = {**self._labels, **labels}
        if spec.kind == "histogram":
            return family.Metric(labels=all_labels, buckets=list(spec.buckets))
        return family.Metric(labels=all_labels)
