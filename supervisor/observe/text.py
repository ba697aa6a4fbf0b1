"""The text for a scraper, made from a snapshot in a worker thread.

Importing ``prometheus_client`` takes 50 ms: only a host that is scraped does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import choose_encoder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from prometheus_client.core import Metric

    from supervisor.observe.families import MetricFamily


class _Snapshot:
    """A collector of a given snapshot; never registered globally."""

    def __init__(self, families: Sequence[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return list(map(_metric, self._families))

    def describe(self) -> Iterator[Metric]:
        """Return nothing, so that registering does not collect."""
        return iter(())


def _metric(family: MetricFamily) -> Metric:
    if family.histograms or family.kind == "histogram":
        histogram = HistogramMetricFamily(
            family.name, family.about, labels=family.labels
        )
        for labels, times in family.histograms:
            histogram.add_metric(labels, list(times.accumulate()), times.sum_s)
        return histogram
    make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = make(family.name, family.about, labels=family.labels)
    for labels, value in family.values:
        metric.add_metric(labels, value)
    return metric


def render(families: Sequence[MetricFamily], accept: str) -> tuple[bytes, str]:
    """Return the figures as text, and its content type.

    Args:
        families: the snapshot.
        accept: the scraper's ``Accept``: OpenMetrics if it asks for that.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(families))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
