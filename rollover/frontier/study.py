"""The whole study: every setting, and a closer look at the recommended one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rollover.frontier.advice import Advice, advise, instead
from rollover.frontier.refine import MOST_ROUNDS, next_setting
from rollover.frontier.settings import is_allowed, is_asleep, name_of, place_of, setting, settings, value_of
from rollover.frontier.setup import Setup
from rollover.frontier.sweep import FrontierPoint, Length, Runner, Trial, TrialResult, run_trials, workers
from rollover.rollout.config import RolloutConfig
from rollover.sim.theory import StepModel

_THEORY_PROMPTS = 4096
Progress = Callable[[str, int, int], None]
"""Called with the name of the current part, the number of its simulations that are done, and their total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The results of all simulations of one setup, with the recommendations drawn from them."""

    setup: Setup
    length: Length
    num_seeds: int
    points: tuple[FrontierPoint, ...]
    """All settings, each strategy's in order of lag."""
    current: FrontierPoint
    """The setting in use, or the default one."""
    advice: tuple[Advice, ...]
    """One recommendation for each lag budget, or a single one."""
    instead: str
    """A sentence on what another setting gains over the setting in use; empty if there is none in use."""
    theory: StepModel

    @property
    def ceiling(self) -> float:
        """Return the trained tokens per unit of time that no schedule exceeds: of replicas that never wait, in batches
        so large that only caches are read, or of a trainer that never waits, if that is slower."""
        scenario, tokens = self.setup.scenario, self.theory.tokens
        trainer_s = scenario.trainer.base_s + scenario.trainer.s_per_token * tokens
        decoded = sum(replica.most_tokens_per_s for replica in scenario.replicas)
        return min(decoded, tokens / trainer_s if trainer_s else math.inf)

    @property
    def sync(self) -> FrontierPoint:
        return self.points[0]

    def of(self, strategy: str) -> tuple[FrontierPoint, ...]:
        return tuple(p for p in self.points if name_of(p.config) == strategy)

    @property
    def strategies(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name_of(p.config) for p in self.points))


def study(
    setup: Setup,
    strategies: Sequence[str],
    length: Length,
    *,
    num_seeds: int,
    lag_budgets: Sequence[float] = (),
    jobs: int = 1,
    progress: Progress = lambda what, done, total: None,
) -> Study:
    """Simulate all of it. Raises ``RunError`` if a simulation cannot make progress."""
    is_in_use = setup.is_in_use
    if not is_in_use:
        usual = ("april", 2.0) if is_allowed("april", setup, 2.0) else ("sync", None)
        setup = replace(setup, rollout=setting(usual[0], setup, usual[1]))
    current = setup.rollout
    place = place_of(current)
    tried = [config for name in strategies for config in settings(name, setup)]
    if current.strategy.kind != "sync":  # in place of the setting that is the same but for its staleness bound
        tried = [*(c for c in tried if place_of(c) != place), current]
    with workers(jobs) as runner:
        bench = Bench(setup, length, num_seeds, runner, progress)
        points = bench.points("settings", tried)
        budgets: list[float | None] = [*lag_budgets] or [None]
        in_use = next(p for p in points if place_of(p.config) == place)
        lags = [*lag_budgets, *[in_use.lag] * (is_in_use and in_use.lag > 0)]
        if not lag_budgets:
            points += bench.points("a closer look", _between(advise(points).config, points, setup))
        points = _at_lags(bench, points, lags)
        order = list(dict.fromkeys(name_of(p.config) for p in points))
        points = sorted(points, key=lambda p: (order.index(name_of(p.config)), value_of(p.config) or 0.0))
        possible = [p for p in points if not is_asleep(name_of(p.config), setup)]
        advice = tuple(advise(possible, budget) for budget in budgets)
    return Study(
        setup=setup,
        length=length,
        num_seeds=num_seeds,
        points=tuple(points),
        current=in_use,
        advice=advice,
        instead=instead(in_use, possible) if is_in_use else "",
        theory=theory(setup),
    )


def theory(setup: Setup) -> StepModel:
    """Return the closed forms for the setup's lengths, with the replicas taken as one."""
    workload, size = setup.lengths.workload(0), setup.rollout.group_size
    rows = [workload.group_lengths(i, size) for i in range(_THEORY_PROMPTS)]
    b0 = sum(r.b0 for r in setup.scenario.replicas)
    return StepModel.of_lengths(rows, batch_size=setup.rollout.rollout_batch_size, b0=b0)


def _at_lags(bench: Bench, points: list[FrontierPoint], lags: Sequence[float]) -> list[FrontierPoint]:
    """Return ``points`` and settings of every strategy at these lags."""
    for number in range(1, MOST_ROUNDS + 1):
        by_name: dict[str, list[FrontierPoint]] = {}
        for point in points:
            by_name.setdefault(name_of(point.config), []).append(point)
        near = [
            config
            for of_strategy in by_name.values()
            for lag in lags
            if (config := next_setting(of_strategy, bench.setup, lag)) is not None
        ]
        if not near:
            break
        points = [*points, *bench.points(f"closer to the lag, round {number}", list(dict.fromkeys(near)))]
    return points


def _between(config: RolloutConfig, points: Sequence[FrontierPoint], setup: Setup) -> list[RolloutConfig]:
    """Return the settings halfway to the neighbours of ``config``."""
    knob = config.strategy.knob
    here = value_of(config)
    if knob is None or here is None or here == math.inf or knob.key == "max_staleness":
        return []
    known = [p.config for p in points if name_of(p.config) == name_of(config)]
    values = sorted(v for c in known if (v := value_of(c)) is not None and v < math.inf)
    place = values.index(here)
    beside = [values[i] for i in (place - 1, place + 1) if 0 <= i < len(values)]
    near = (setting(name_of(config), setup, (here + other) / 2) for other in beside)
    return [c for c in dict.fromkeys(near) if c not in known]


class Bench:
    """Runs trials over all seeds and pairs them with the trials of the first setting."""

    def __init__(self, setup: Setup, length: Length, num_seeds: int, runner: Runner, progress: Progress) -> None:
        self.setup = setup
        self._length = length
        self._num_seeds = num_seeds
        self._runner = runner
        self._progress = progress
        self._baseline: tuple[TrialResult, ...] = ()

    def points(self, what: str, configs: Sequence[RolloutConfig]) -> list[FrontierPoint]:
        """Return a point for each of ``configs``. Gains are over the first of the first call."""
        trials = [
            Trial(config=config, seed=seed, lengths=self.setup.lengths, scenario=self.setup.scenario)
            for config in configs
            for seed in range(self._num_seeds)
        ]
        done = run_trials(trials, self._length, self._runner, lambda n: self._progress(what, n, len(trials)))
        points = []
        for place, config in enumerate(configs):
            outcomes = tuple(done[place * self._num_seeds : (place + 1) * self._num_seeds])
            self._baseline = self._baseline or outcomes
            point = FrontierPoint(config=config, outcomes=outcomes, baseline=self._baseline, lag_of=self.setup.lag_of)
            points.append(point)
        return points
