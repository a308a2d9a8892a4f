"""Settings simulated over seeds, in this process or in several. All settings of a seed use the same lengths, so that
comparisons are paired."""

from __future__ import annotations

import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from rollover.errors import ConfigError
from rollover.rollout.config import RolloutConfig
from rollover.rollout.lag import LagOf, LagSummary
from rollover.sim.result import Simulation
from rollover.sim.run import simulate
from rollover.sim.scenario import Scenario
from rollover.workload.source import Lengths

# Of Student's distribution: 97.5% for 1, 2, ... degrees of freedom; beyond the last, the normal's.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """The length of a simulation, in training steps."""

    steps: int
    warmup: int
    """Number of initial steps that no figure counts."""

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < self.steps:
            raise ConfigError(f"--warmup must be at least 0 and below --steps ({self.steps}), got {self.warmup}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A simulation to run: a setting, a seed, lengths and a scenario."""

    config: RolloutConfig
    seed: int
    lengths: Lengths
    scenario: Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """Figures of one simulation without its warm-up; waste is counted over the whole run."""

    tokens_per_s: float
    """Trained tokens per unit of time of the whole loop."""
    lags: LagSummary
    iterations: float
    """K: iterations per step."""
    mean_running: float
    step_s: float
    trained_length: float
    """Mean length of trained responses over the mean length of admitted responses."""
    prefilled: float
    """Tokens prefilled, prompts included, over tokens trained."""
    wasted: Mapping[str, float]
    """Wasted share of decoded tokens, by cause."""

    @classmethod
    def of(cls, run: Simulation, length: Length) -> TrialResult:
        window = run.after(length.warmup)
        wasted = {str(cause): n / run.tokens.decoded for cause, n in run.tokens.wasted.items() if n}
        return cls(
            tokens_per_s=window.tokens_per_s,
            lags=window.lag,
            iterations=window.iterations,
            mean_running=window.mean_running,
            step_s=window.seconds / len(window.steps),
            trained_length=window.mean_length / statistics.fmean(run.admitted_lengths),
            prefilled=window.prefilled_tokens / window.trained_tokens,
            wasted=wasted,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanOverSeeds:
    """A mean over seeds with its 95% interval."""

    mean: float
    margin: float | None
    """Half the width of its 95% interval; ``None`` for one seed."""

    @classmethod
    def of(cls, values: Sequence[float]) -> MeanOverSeeds:
        if len(values) < 2:
            return cls(mean=values[0], margin=None)
        student = _STUDENT[len(values) - 2] if len(values) - 2 < len(_STUDENT) else 1.96
        return cls(mean=statistics.fmean(values), margin=student * statistics.stdev(values) / math.sqrt(len(values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """A setting of a strategy with its results, by seed."""

    config: RolloutConfig
    outcomes: tuple[TrialResult, ...]
    baseline: tuple[TrialResult, ...] = field(repr=False)
    """Synchronous rollout on the same lengths, seed by seed."""
    lag_of: LagOf = "batch"

    def mean(self, figure: str) -> float:
        """Return the mean over seeds of a numeric field of ``TrialResult``."""
        return statistics.fmean(getattr(o, figure) for o in self.outcomes)

    @property
    def gain(self) -> MeanOverSeeds:
        """Return the throughput relative to synchronous rollout: the mean of paired ratios."""
        pairs = zip(self.outcomes, self.baseline, strict=True)
        return MeanOverSeeds.of([o.tokens_per_s / b.tokens_per_s for o, b in pairs])

    @property
    def lag(self) -> float:
        """Return the lag that counts, mean over seeds."""
        return self.lag_over(self.lag_of)

    def lag_over(self, what: str) -> float:
        """Return the mean over seeds of a field of ``LagSummary``."""
        return statistics.fmean(getattr(o.lags, what) for o in self.outcomes)

    @property
    def max_lag(self) -> int:
        return max(o.lags.max for o in self.outcomes)

    @property
    def wasted(self) -> dict[str, float]:
        """Return the share of decoded tokens wasted by each cause, mean over seeds."""
        causes = sorted({cause for o in self.outcomes for cause in o.wasted})
        return {cause: statistics.fmean(o.wasted.get(cause, 0.0) for o in self.outcomes) for cause in causes}


def run_trial(trial: Trial, *, length: Length) -> TrialResult:
    run = simulate(
        trial.config.build_strategy(trial.scenario.capabilities),
        trial.lengths.workload(trial.seed),
        trial.scenario,
        steps=length.steps,
        seed=trial.seed,
    )
    return TrialResult.of(run, length)


Runner = Callable[[Callable[[Trial], TrialResult], Sequence[Trial]], Iterable[TrialResult]]
"""Outcomes of trials in their order, as ``map`` gives them."""


@contextmanager
def workers(jobs: int) -> Iterator[Runner]:
    """Use ``jobs`` processes, or this one alone. The results do not depend on their number."""
    if jobs == 1:
        yield map
        return
    context = multiprocessing.get_context("spawn")  # a copy of this process might copy a lock that a thread holds
    pool = ProcessPoolExecutor(max_workers=jobs, mp_context=context)
    try:
        yield pool.map
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def run_trials(
    trials: Sequence[Trial], length: Length, runner: Runner, on_done: Callable[[int], None] = lambda num_done: None
) -> list[TrialResult]:
    """Run the trials, and return their outcomes in the order of ``trials``. Raises ``RunError`` if a simulation cannot
    make progress."""
    found = []
    for outcome in runner(partial(run_trial, length=length), trials):
        found.append(outcome)
        on_done(len(found))
    return found
