"""Observers of a run: they turn its typed events into metrics and into progress on the terminal.

Invariants: they only listen. A run without any of them trains the same weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollover.algorithms import Algorithm
from rollover.batch import Batch, WasteCause
from rollover.engine.base import EngineMetrics
from rollover.errors import printable
from rollover.report.alarms import EARLY, RECENT, alarms
from rollover.report.measures import MOST_KINDS, failure_kind
from rollover.report.metrics import MetricRow, MetricsWriter
from rollover.report.progress import Progress
from rollover.report.samples import COLUMNS
from rollover.rollout.events import Event, SampleFailed
from rollover.rollout.ledger import Ledger
from rollover.run.evaluation import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """A batch was trained and its weights are in the engines."""

    step: int
    batch: Batch
    time_s: float
    """Seconds since the run began, over all its processes."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The weights of ``version`` were evaluated on the held-out prompts."""

    version: int
    time_s: float
    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class Notice:
    """Something happened that the user should know."""

    text: str


RunEvent = Event | StepEnded | Evaluated | Notice
"""The events that observers receive: the events of the rollout and of the loop around it."""
Observer = Callable[[RunEvent], None]


def samples_to(writer: MetricsWriter, every_steps: int, rows: Callable[[Batch], list[list[Any]]]) -> Observer:
    """Return an observer that sends some samples of every so many steps to the trackers. ``rows`` makes rows of
    ``report.samples.COLUMNS`` of a batch."""

    def observe(event: RunEvent) -> None:
        if isinstance(event, StepEnded) and event.step % every_steps == 0 and "reward/mean" in event.metrics:
            writer.write_samples(event.step, COLUMNS, rows(event.batch))  # a skipped batch has no mean

    return observe


def alarms_to(show: Callable[[str], None], algorithm: Algorithm | None = None) -> Observer:
    """Return an observer that shows the alarms of a run after 3 and 10 steps, and whenever twice as many have ended."""
    rows: deque[MetricRow] = deque(maxlen=20 * RECENT)
    num_steps, shown_at = 0, EARLY

    def observe(event: RunEvent) -> None:
        nonlocal num_steps, shown_at
        if not isinstance(event, StepEnded):
            return
        rows.append(MetricRow(kind="step", step=event.step, time_s=event.time_s, values=event.metrics))
        num_steps += 1
        if num_steps >= shown_at:
            shown_at = max(RECENT, 2 * num_steps)
            for alarm in alarms(rows, algorithm):
                show(f"alarm: {alarm}")

    return observe


@dataclass(frozen=True, slots=True, kw_only=True)
class RunObserver:
    """Writes a row of metrics for each training step and evaluation, shows on the terminal what happens, and reports
    each step to the engine."""

    metrics: MetricsWriter
    progress: Progress
    ledger: Ledger
    """The counts that are shown after every event of the rollout."""
    batch_size: int
    """Groups in a batch."""
    engine: EngineMetrics | None
    shown: set[str] = field(default_factory=set)
    """Kinds of failures of which one was shown."""

    def __call__(self, event: RunEvent) -> None:
        match event:
            case StepEnded():
                self.metrics.write("step", event.step, event.time_s, event.metrics)
                self.progress.step(event.metrics)
                if self.engine is not None:
                    self.engine.step_ended(event.step, event.metrics)
            case Evaluated():
                self.metrics.write("eval", event.version, event.time_s, event.evaluation.metrics())
                self._show_evaluation(event.version, event.evaluation)
            case Notice():
                self.progress.message(event.text)
            case SampleFailed(cause=WasteCause.FAILED):
                self._show_failure(event)
            case _:
                self._show_rollout()

    def _show_failure(self, event: SampleFailed) -> None:
        if (kind := failure_kind(event.reason)) not in self.shown and len(self.shown) < MOST_KINDS:
            self.shown.add(kind)
            reason = printable(" ".join(event.reason.split()))
            self.progress.message(f"sample {event.sample_id} failed, the first of its kind: {reason}")

    def _show_rollout(self) -> None:
        ledger = self.ledger
        self.progress.rollout(
            len(ledger.ready), self.batch_size, len(ledger.running), len(ledger.parked), ledger.tokens.decoded
        )

    def _show_evaluation(self, version: int, evaluation: Evaluation) -> None:
        self.progress.evaluation(version, evaluation.metrics())
        if version == 0:
            self.progress.message(f"response lengths before training: {describe_lengths(evaluation.lengths)}")
        if found := evaluation.failures:
            self.progress.message(f"{len(found)} evaluation samples could not be scored and count as 0: {found[0]}")
        oldest, newest = evaluation.versions
        if (oldest, newest) != (version, version):
            self.progress.message(f"its samples are of the weights after steps {oldest} to {newest}")


def describe_lengths(lengths: Sequence[int]) -> str:
    """Describe response lengths by their quantiles and the length of their tail, in tokens."""
    ordered = sorted(lengths)
    median = max(1, ordered[len(ordered) // 2])
    p95, longest = ordered[int(0.95 * (len(ordered) - 1))], ordered[-1]
    return (
        f"median {median}, p95 {p95}, max {longest} tokens"
        f" (p95/median {p95 / median:.1f}, max/median {longest / median:.1f})"
    )
