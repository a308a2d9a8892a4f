"""The metrics of a swarm in Prometheus' text format. Pure.

Names are those of ``metrics.jsonl`` and of the protocol's page with ``rollover_`` before them; what has not been
measured yet is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rollover.swarm.coordinator.status.snapshot import SwarmStatus, WorkerStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_WASTED = "rollout/wasted_tokens/"
_STEP = {
    "staleness_mean": ("staleness/mean", "Versions that the tokens of the last batch were behind, on average."),
    "staleness_max": ("staleness/max", "Versions that the oldest token of the last batch was behind."),
    "starvation_age": ("rollout/starvation_age", "Versions since the oldest group that is not trained yet was begun."),
    "trained_tokens": ("rollout/trained_tokens", "Tokens trained so far."),
    "live_tokens": ("rollout/live_tokens", "Tokens that wait to be trained."),
}
_COUNTERS = {
    "duplicates": ("repeated_tokens", "Tokens that arrived more than once and came out once."),
    "fenced_writes": ("fenced", "Messages under leases that had ended or were another's; they changed nothing."),
    "late_tokens": ("late_tokens", "Tokens in such messages."),
    "adopted_calls": ("adopted_calls", "Calls that continued with what a worker had kept."),
    "late_accepted": ("late_accepted", "Calls among them whose worker had lost its lease in between."),
    "expired_leases": ("expired_leases", "Workers that lost their lease because they were silent for too long."),
    "repairs": ("repairs", "Messages that were sent again because they, or their answers, were lost."),
    "unconfirmed_tokens": ("unconfirmed_tokens", "Tokens of versions that their worker had not confirmed; refused."),
    "workers_sent_away": ("workers_sent_away", "Workers that were sent away since they broke the protocol or lied."),
    "refused_logins": ("refused_logins", "Requests with a token that is unknown or was revoked."),
    "refused_protocols": ("refused_protocols", "Clients that speak another protocol."),
    "refused_frames": ("refused_frames", "Frames that could not be read, after which their connection was ended."),
    "relieved_calls": ("relieved_calls", "Calls that were taken from slow workers and given to idle ones."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One number with its labels.

    Example: ``Sample(labels={"worker": "laptop"}, value=812.5)``
    """

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A metric: its name, what it counts, and its numbers.

    Example: ``Family(name="workers", kind="gauge", help="Workers.", samples=(Sample(labels={}, value=3.0),))``
    """

    name: str
    kind: str
    """"gauge" or "counter"."""
    help: str
    samples: tuple[Sample, ...]


def exposition(status: SwarmStatus) -> str:
    """Return the metrics of a swarm as Prometheus reads them.

    Example: a swarm of one worker with 512 tokens to be journaled has the line
    ``rollover_spool_depth{worker="laptop"} 512``.
    """
    lines: list[str] = []
    for family in families(status):
        if family.samples:
            name = f"rollover_{family.name}"
            lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
            lines += [f"{name}{_labels(sample.labels)} {_number(sample.value)}" for sample in family.samples]
    return "\n".join(lines) + "\n"


def families(status: SwarmStatus) -> Iterator[Family]:
    """Yield the metrics of a swarm."""
    yield from _of_swarm(status)
    yield from _of_workers(status.workers)
    yield from _of_publications(status)
    for name, (key, text) in _STEP.items():
        yield _one(name, "gauge", text, status.metrics.get(key))
    for name, (key, text) in _COUNTERS.items():
        yield _one(name, "counter", text, status.counters.get(key))
    dropped = (
        Sample(labels={"reason": key.removeprefix(_WASTED)}, value=value)
        for key, value in status.metrics.items()
        if key.startswith(_WASTED)
    )
    yield Family(name="dropped", kind="counter", help="Wasted tokens by cause.", samples=tuple(dropped))


def _of_swarm(status: SwarmStatus) -> Iterator[Family]:
    states = ("ready", "full", "checking", "loading", "away", "sent away")
    counts = {state: sum(worker.state == state for worker in status.workers) for state in states}
    samples = tuple(Sample(labels={"state": state}, value=count) for state, count in counts.items())
    yield Family(name="workers", kind="gauge", help="Workers by state.", samples=samples)
    yield _one("version", "gauge", "The newest version of the weights.", status.version)
    yield _one("step", "gauge", "The training step that ended last.", status.step)
    yield _one("waiting_calls", "gauge", "Calls that no worker has.", status.num_waiting)
    yield _one("status_time_s", "gauge", "When this was written, in seconds since 1970.", status.time_s)
    text = "Time from a publication until the last worker served it."
    yield _one("convergence_s", "gauge", text, status.convergence_s)


def _of_workers(workers: Iterable[WorkerStatus]) -> Iterator[Family]:
    workers = tuple(workers)

    def each(name: str, text: str, values: Iterable[float | None], kind: str = "gauge") -> Family:
        pairs = zip(workers, values, strict=True)
        samples = (Sample(labels={"worker": w.name}, value=value) for w, value in pairs if value is not None)
        return Family(name=name, kind=kind, help=text, samples=tuple(samples))

    yield each("worker_version", "The version that the worker serves.", (w.version for w in workers))
    yield each("worker_lag", "Versions that the worker is behind the newest.", (w.lag for w in workers))
    yield each("tokens_per_s", "Tokens that the worker decodes in a second.", (w.tokens_per_s for w in workers))
    yield each("decoded_tokens", "Tokens that the worker decoded.", (w.num_decoded for w in workers), "counter")
    yield each("running_calls", "Calls that the worker has.", (w.num_calls for w in workers))
    yield each("credits", "Further calls that the worker has room for.", map(_credits, workers))
    yield each("spool_depth", "Tokens that the worker holds until they are journaled.", (w.num_held for w in workers))
    yield each("logprob_drift", "Distance of its log-probs from the trainer's, in nats.", (w.drift for w in workers))
    yield each("prepare_s", "Time to fetch and make the last weights.", (w.prepare_s for w in workers))
    yield each("pause_s", "Time for which decoding was paused for them.", (w.pause_s for w in workers))
    fetched = (None if w.prepare_s is None else w.wire_bytes for w in workers)
    yield each("wire_bytes", "Bytes fetched for them.", fetched)


def _of_publications(status: SwarmStatus) -> Iterator[Family]:
    for newest in status.publications[-1:]:
        for name, text, value in (
            ("publication_bytes", "Bytes of the newest publication.", newest.wire_bytes),
            ("publication_full_bytes", "Bytes of all its tensors, uncompressed.", newest.full_bytes),
            ("publication_s", "Time that writing it took.", newest.elapsed_s),
            ("changed_fraction", "Share of its elements that are new.", newest.changed_fraction),
        ):
            if value is None:
                continue
            sample = Sample(labels={"kind": newest.kind}, value=value)
            yield Family(name=name, kind="gauge", help=text, samples=(sample,))


def _credits(worker: WorkerStatus) -> int:
    return max(0, worker.max_running - worker.num_calls) if worker.state == "ready" else 0


def _one(name: str, kind: str, text: str, value: float | None) -> Family:
    samples = () if value is None else (Sample(labels={}, value=value),)
    return Family(name=name, kind=kind, help=text, samples=samples)


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return f"{value:d}" if isinstance(value, int) else repr(float(value))
