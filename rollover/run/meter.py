"""The metrics of a training step: the seconds that its parts took, and its share of counters that only grow."""

from __future__ import annotations

import math
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rollover.batch import Batch, TrainedStep, WasteCause
from rollover.clock import Clock
from rollover.engine.base import EngineMetrics
from rollover.environments.scorer import RewardScorer
from rollover.report import throughput
from rollover.report.metrics import SPEED
from rollover.rollout.ledger import Ledger
from rollover.rollout.metrics import batch_metrics, drift_metrics, ledger_metrics
from rollover.run.observers import StepEnded
from rollover.tasks.curriculum import Curriculum


class StepMeter:
    """Measures one training step after another.

    Args:
        overlaps_training: whether samples are decoded during the whole step, or only while a batch is collected.
        curriculum: which chooses the prompts, if anything does.
    """

    def __init__(
        self,
        ledger: Ledger,
        scorer: RewardScorer,
        engine_metrics: EngineMetrics | None,
        clock: Clock,
        *,
        overlaps_training: bool,
        curriculum: Curriculum | None = None,
    ) -> None:
        self._ledger = ledger
        self._scorer = scorer
        self._engine_metrics = engine_metrics
        self._clock = clock
        self._overlaps_training = overlaps_training
        self._curriculum = curriculum
        self._timings: defaultdict[str, float] = defaultdict(float)
        self._measured: dict[str, float] = {}
        self._step_began_s = self._resumed_s = clock.now_s()
        self._at_last_step = self._counters()
        self._replayed = frozenset(ledger.replay)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to the metric ``name`` of the step."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._timings[name] += time.perf_counter() - began_s

    def measured(self, name: str, value: float) -> None:
        """Set the metric ``name`` of the step, replacing any earlier value."""
        self._measured[name] = value

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the seconds inside from the step; if samples are decoded meanwhile, they count, as an evaluation."""
        began_s, is_decoding = self._clock.now_s(), bool(self._ledger.running)
        try:
            yield
        finally:
            elapsed_s = self._clock.now_s() - began_s
            if is_decoding or self._ledger.running:
                self._timings["time/evaluate_s"] += elapsed_s
            else:
                self._step_began_s += elapsed_s

    def step_ended(self, batch: Batch, trained: TrainedStep) -> StepEnded:
        """Return the metrics of the step that ends now, and start the next one. A batch that an earlier process decoded
        has no speed. One that it decoded in part has no training speed, since no step has those seconds."""
        now_s = self._clock.now_s()
        counters, before = self._counters(), self._at_last_step
        step_s = now_s - self._step_began_s
        metrics = {
            **trained.metrics,
            **({} if WasteCause.SKIPPED in trained.untrained else batch_metrics(batch)),
            **ledger_metrics(self._ledger),
            **({} if self._curriculum is None else self._curriculum.metrics()),
            **drift_metrics(trained.drift),
            **({} if self._engine_metrics is None else self._engine_metrics.take_metrics()),
            **self._timings,
            **self._measured,
            **{name: value - before.rewards[name] for name, value in counters.rewards.items()},
            **throughput.of_step(
                trained_tokens=batch.num_tokens - sum(trained.untrained.values()),
                decoded_tokens=counters.decoded - before.decoded,
                step_s=step_s,
                decoding_s=step_s if self._overlaps_training else self._timings["time/rollout_s"],
            ),
            "memory/peak_bytes": peak_memory_bytes(),
        }
        if WasteCause.SKIPPED not in trained.untrained:
            if batch.step in self._replayed:
                metrics = {name: value for name, value in metrics.items() if not name.startswith(SPEED)}
            else:
                if any(s.end_s < self._resumed_s for t in batch.trajectories for s in t.segments):
                    del metrics[throughput.TRAINED.name]
                self._resumed_s = -math.inf
        self._timings.clear()
        self._measured.clear()
        self._at_last_step = counters
        self._step_began_s = now_s
        return StepEnded(step=batch.step, batch=batch, time_s=now_s, metrics=metrics)

    def _counters(self) -> _Counters:
        return _Counters(self._ledger.tokens.decoded, self._scorer.costs())


class _Counters(NamedTuple):
    """Running totals; a step's share is a difference of two."""

    decoded: int
    rewards: dict[str, float]


def peak_memory_bytes() -> int:
    """Return the largest resident size that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
