"""The metrics of a swarm for Prometheus.

Names are those of ``metrics.jsonl`` and of the protocol's page with ``rollover_`` before them, and ``_total`` after
those of counters; what has not been measured yet is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollover.swarm.coordinator.status.snapshot import SwarmStatus, WorkerStatus

__all__ = ["CONTENT_TYPE", "exposition"]

_WASTED = "rollout/wasted_tokens/"
_STEP = {
    "staleness_mean": ("staleness/mean", "Versions that the tokens of the last batch were behind, on average."),
    "staleness_max": ("staleness/max", "Versions that the oldest token of the last batch was behind."),
    "starvation_age": ("rollout/starvation_age", "Versions since the oldest group that is not trained yet was begun."),
    "trained_tokens": ("rollout/trained_tokens", "Tokens trained so far."),
    "live_tokens": ("rollout/live_tokens", "Tokens that wait to be trained."),
}
_COUNTERS = {
    "fenced_writes": ("fenced", "Messages under leases that had ended or were another's; they changed nothing."),
    "late_tokens": ("late_tokens", "Tokens in such messages."),
    "adopted_calls": ("adopted_calls", "Calls that continued with what a worker had kept."),
    "late_accepted": ("late_accepted", "Calls among them whose worker had lost its lease in between."),
    "expired_leases": ("expired_leases", "Workers that lost their lease because they were silent for too long."),
    "out_of_order": ("out_of_order", "Connections that ended since messages did not follow each other in order."),
    "workers_sent_away": ("workers_sent_away", "Workers that were sent away since they broke the protocol or lied."),
    "refused_logins": ("refused_logins", "Requests with a token that is unknown or was revoked."),
    "refused_protocols": ("refused_protocols", "Clients that speak another protocol."),
    "refused_frames": ("refused_frames", "Frames that could not be read, after which their connection was ended."),
    "moved_calls": ("moved_calls", "Calls that were taken from slow workers and given to idle ones."),
}


def exposition(status: SwarmStatus) -> bytes:
    """Return the metrics of a swarm as Prometheus reads them.

    Example: a swarm of one worker with 512 tokens to be journaled has the line
    ``rollover_spool_depth{worker="laptop"} 512.0``.
    """
    return generate_latest(_SwarmCollector(status))


class _SwarmCollector(Collector):
    """Yields the metrics of one state."""

    def __init__(self, status: SwarmStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        return (metric for metric in self._all() if metric.samples)

    def _all(self) -> Iterator[Metric]:
        status = self._status
        yield from _of_swarm(status)
        yield from _of_workers(status.workers)
        for newest in status.publications[-1:]:
            for name, text, value in (
                ("publication_bytes", "Bytes of the newest publication.", newest.wire_bytes),
                ("publication_full_bytes", "Bytes of all its tensors, uncompressed.", newest.full_bytes),
                ("publication_s", "Time that writing it took.", newest.elapsed_s),
                ("changed_fraction", "Share of its elements that are new.", newest.changed_fraction),
            ):
                yield _gauge(name, text, [(newest.kind, value)], label="kind")
        for name, (key, text) in _STEP.items():
            yield _gauge(name, text, [("", status.metrics.get(key))])
        for name, (key, text) in _COUNTERS.items():
            yield _counter(name, text, [("", status.counters.get(key))])
        wasted = ((k.removeprefix(_WASTED), v) for k, v in status.metrics.items() if k.startswith(_WASTED))
        yield _counter("dropped", "Wasted tokens by cause.", wasted, label="reason")


_Values = Iterable[tuple[str, float | None]]
"""Values by label."""


def _of_swarm(status: SwarmStatus) -> Iterator[Metric]:
    states = ("ready", "full", "checking", "loading", "away", "sent away")
    counts = [(state, sum(worker.state == state for worker in status.workers)) for state in states]
    yield _gauge("workers", "Workers by state.", counts, label="state")
    yield _gauge("version", "The newest version of the weights.", [("", status.version)])
    yield _gauge("step", "The training step that ended last.", [("", status.step)])
    yield _gauge("waiting_calls", "Calls that no worker has.", [("", status.num_waiting)])
    yield _gauge("status_time_s", "When this was written, in seconds since 1970.", [("", status.time_s)])
    text = "Time from a publication until the last worker served it."
    yield _gauge("convergence_s", text, [("", status.convergence_s)])


def _of_workers(workers: tuple[WorkerStatus, ...]) -> Iterator[Metric]:
    decoded = [(w.name, w.num_decoded) for w in workers]
    yield _counter("decoded_tokens", "Tokens that the worker decoded.", decoded, label="worker")
    for name, text, values in (
        ("worker_version", "The version that the worker serves.", (w.version for w in workers)),
        ("worker_lag", "Versions that the worker is behind the newest.", (w.lag for w in workers)),
        ("tokens_per_s", "Tokens that the worker decodes in a second.", (w.tokens_per_s for w in workers)),
        ("running_calls", "Calls that the worker has.", (w.num_calls for w in workers)),
        ("credits", "Further calls that the worker has room for.", map(_credits, workers)),
        ("spool_depth", "Tokens that the worker holds until they are journaled.", (w.num_held for w in workers)),
        ("logprob_drift", "Distance of its log-probs from the trainer's, in nats.", (w.drift for w in workers)),
        ("prepare_s", "Time to fetch and make the last weights.", (w.prepare_s for w in workers)),
        ("pause_s", "Time for which decoding was paused for them.", (w.pause_s for w in workers)),
        ("wire_bytes", "Bytes fetched for them.", (None if w.prepare_s is None else w.wire_bytes for w in workers)),
    ):
        yield _gauge(name, text, zip((w.name for w in workers), values, strict=True), label="worker")


def _credits(worker: WorkerStatus) -> int:
    return max(0, worker.max_running - worker.num_calls) if worker.state == "ready" else 0


def _gauge(name: str, text: str, values: _Values, *, label: str = "") -> Metric:
    return _filled(GaugeMetricFamily(f"rollover_{name}", text, labels=[label] if label else []), values, label)


def _counter(name: str, text: str, values: _Values, *, label: str = "") -> Metric:
    return _filled(CounterMetricFamily(f"rollover_{name}", text, labels=[label] if label else []), values, label)


def _filled(
    metric: GaugeMetricFamily | CounterMetricFamily, values: _Values, label: str
) -> GaugeMetricFamily | CounterMetricFamily:
    for of, value in values:
        if value is not None:
            metric.add_metric([of] if label else [], value)
    return metric
