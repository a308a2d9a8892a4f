"""The numbers of ``/status.json`` for Prometheus, under their names there. What is not measured yet is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollover.swarm.coordinator.status.snapshot import SwarmStatus

__all__ = ["CONTENT_TYPE", "exposition"]


def exposition(status: SwarmStatus) -> bytes:
    """Return the metrics of a swarm as Prometheus reads them."""
    return generate_latest(_SwarmCollector(status))


class _SwarmCollector(Collector):
    """Yields the metrics of one state."""

    def __init__(self, status: SwarmStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        found: dict[tuple[str, str], dict[str, float]] = {
            ("workers", "state"): dict(Counter(worker.state for worker in status.workers)),
            ("metrics", "name"): dict(status.metrics),
        }
        records = [("", "", "", status), *(("worker_", "worker", each.name, each) for each in status.workers)]
        records += [("publication_", "kind", newest.kind, newest) for newest in status.publications[-1:]]
        for prefix, label, name, record in records:
            for key, value in _numbers(record):
                found.setdefault((prefix + key, label), {})[name] = value
        for (key, label), values in found.items():
            gauge = GaugeMetricFamily(f"rollover_{key}", f"{key} of /status.json", labels=[label] if label else [])
            for name, value in values.items():
                gauge.add_metric([name] if label else [], value)
            yield gauge
        for key, count in status.counters.items():
            yield CounterMetricFamily(f"rollover_{key}", f"{key} among the counters of /status.json", value=count)


def _numbers(record: object) -> Iterator[tuple[str, float]]:
    for field in fields(record):  # type: ignore[arg-type]
        if isinstance(value := getattr(record, field.name), int | float):
            yield field.name, value
