"""The results of a simulated run: records by step, and the figures of a comparison."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields

from rollover.batch import Batch
from rollover.rollout.lag import BatchLag, LagSummary
from rollover.rollout.records import Tokens
from rollover.sim.replica import Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step. Counters cover this step alone."""

    step: int
    duration_s: float
    """Time from the end of the previous step until this one was trained and the new weights were available."""
    iterations: float
    """Decoding iterations, mean over replicas."""
    mean_running: float
    """Running samples: mean over the step, sum over replicas; 0 for a step that took no time."""
    prefilled_tokens: int
    lag: BatchLag
    """Trained tokens by their lag, group by group."""
    lengths: tuple[int, ...]
    """Lengths of the trained responses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A whole run. Figures leave out the first ``warmup`` steps if they take one."""

    steps: tuple[StepRecord, ...]
    tokens: Tokens
    admitted_lengths: tuple[int, ...]
    """Lengths of every sample of every group that was started, in that order."""

    def after(self, warmup: int) -> Window:
        """Return the run from step ``warmup`` on, as far as it consists of whole rounds. If rounds overlap, each step
        for which something was decoded counts as one."""
        return Window(whole_rounds(self.steps, warmup))


def whole_rounds(steps: Sequence[StepRecord], warmup: int = 0) -> Sequence[StepRecord]:
    """Return the steps from ``warmup`` on without a first and a last round that may be cut: batches trained from one
    round cost it together, and only the first of them shows that. A step begins a round if something was decoded for
    it. Where no round from ``warmup`` on is whole, return the last one that is; where none is at all, return all steps
    from ``warmup`` on, or from where their round began: batches that were collected before take no time."""
    begins = [i for i, step in enumerate(steps) if step.iterations > 0]
    late = [i for i in begins if i >= warmup]
    if len(begins) < 2:
        return steps[min([warmup, *begins]) :]
    first, last = (late[0], late[-1]) if len(late) > 1 else begins[-2:]
    return steps[first:last]


class Window:
    """Figures over some consecutive steps."""

    def __init__(self, steps: Sequence[StepRecord]) -> None:
        if not steps:
            raise ValueError("a window needs at least one step: simulate more steps than the warm-up takes")
        self.steps = steps
        self.seconds = sum(s.duration_s for s in steps)
        self.trained_tokens = sum(n for step in steps for n in step.lengths)
        self.lag = LagSummary.of([step.lag for step in steps])

    @property
    def steps_per_s(self) -> float:
        return len(self.steps) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Return the number of trained tokens per second of the whole loop."""
        return self.trained_tokens / self.seconds

    @property
    def iterations(self) -> float:
        """Return K: iterations per step."""
        return statistics.fmean(s.iterations for s in self.steps)

    @property
    def mean_running(self) -> float:
        return sum(s.mean_running * s.duration_s for s in self.steps) / self.seconds

    @property
    def prefilled_tokens(self) -> int:
        return sum(s.prefilled_tokens for s in self.steps)

    @property
    def lengths(self) -> list[int]:
        return [n for s in self.steps for n in s.lengths]

    @property
    def mean_length(self) -> float:
        return statistics.fmean(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meter:
    """Counters of a run that only grow."""

    now_s: float = 0.0
    iterations: float = 0.0
    """Iterations, mean over replicas."""
    sample_s: float = 0.0
    """Integral of the number of running samples over time."""
    prefilled_tokens: int = 0

    @classmethod
    def read(cls, replicas: Sequence[Replica], now_s: float) -> Meter:
        return cls(
            now_s=now_s,
            iterations=statistics.fmean(r.iterations for r in replicas),
            sample_s=sum(r.sample_s for r in replicas),
            prefilled_tokens=sum(r.prefilled_tokens for r in replicas),
        )

    def since(self, before: Meter) -> Meter:
        return Meter(**{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)})


def step_record(batch: Batch, used: Meter) -> StepRecord:
    """Return the record of ``batch``'s step, in which ``used`` was counted."""
    return StepRecord(
        step=batch.step,
        duration_s=used.now_s,
        iterations=used.iterations,
        mean_running=used.sample_s / used.now_s if used.now_s else 0.0,
        prefilled_tokens=used.prefilled_tokens,
        lag=BatchLag.of(batch),
        lengths=tuple(trajectory.num_tokens for trajectory in batch.trajectories),
    )
