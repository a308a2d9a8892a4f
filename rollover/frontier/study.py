"""The whole study: every setting, a closer look at the recommended one, its sensitivity and its timelines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rollover.frontier.advice import Advice, advise
from rollover.frontier.pictures import Picture, pictures
from rollover.frontier.refine import MOST_ROUNDS, next_setting
from rollover.frontier.settings import is_asleep, name_of, place_of, setting, settings, value_of
from rollover.frontier.setup import Setup
from rollover.frontier.sweep import FrontierPoint, Length, Runner, Trial, TrialResult, run_trials, workers
from rollover.rollout.config import RolloutConfig
from rollover.sim.theory import StepModel
from rollover.workload.law import MAX_TOKENS, LengthLaw

_THEORY_PROMPTS = 4096
Progress = Callable[[str, int, int], None]
"""Called with the name of the current part, the number of its simulations that are done, and their total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """One thing changed, everything else as it is.

    Example: ``Variation(what="cap", value=8192, point=point)``: the setting with responses of up to 8,192 tokens.
    """

    what: str
    """``group size``, ``cap`` or ``B0``."""
    value: float
    point: FrontierPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The results of all simulations of one setup, with the recommendations drawn from them.

    Example: a study of ``sync`` and ``april`` with two lag budgets has ``strategies == ("sync", "april")`` and two
    pieces of ``advice``.
    """

    setup: Setup
    length: Length
    num_seeds: int
    points: tuple[FrontierPoint, ...]
    """All settings, each strategy's in order of lag."""
    current: FrontierPoint
    """The setting in use, or the default one."""
    advice: tuple[Advice, ...]
    """One recommendation for each lag budget, or a single one."""
    variations: tuple[Variation, ...]
    pictures: tuple[Picture, ...]
    theory: StepModel

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
    """Simulate all of it.

    Raises:
        RunError: a simulation cannot make progress.
    """
    if not setup.is_in_use:
        setup = replace(setup, rollout=setting("april", setup, 2.0))
    current = setup.rollout
    place = place_of(current)
    tried = [config for name in strategies for config in settings(name, setup)]
    if current.strategy.kind != "sync":  # in place of the setting that is the same but for its staleness bound
        tried = [*(c for c in tried if place_of(c) != place), current]
    with workers(jobs) as runner:
        bench = _Bench(setup, length, num_seeds, runner, progress)
        points = bench.points("settings", tried)
        budgets: list[float | None] = [*lag_budgets] or [None]
        points = _ordered(_closer(bench, points, lag_budgets))
        possible = [p for p in points if not is_asleep(name_of(p.config), setup)]
        advice = tuple(advise(possible, budget) for budget in budgets)
        shown = list(dict.fromkeys([points[0].config, current, advice[-1].config]))
        variations = tuple(bench.variations(shown))
    return Study(
        setup=setup,
        length=length,
        num_seeds=num_seeds,
        points=tuple(points),
        current=next(p for p in points if place_of(p.config) == place),
        advice=advice,
        variations=variations,
        pictures=pictures(setup, shown),
        theory=theory(setup),
    )


def theory(setup: Setup) -> StepModel:
    """Return the closed forms for the setup's lengths, with the replicas taken as one."""
    workload, size = setup.lengths.workload(0), setup.rollout.group_size
    rows = [workload.group_lengths(i, size) for i in range(_THEORY_PROMPTS)]
    b0 = sum(r.b0 for r in setup.scenario.replicas)
    return StepModel.of_lengths(rows, batch_size=setup.rollout.rollout_batch_size, b0=b0)


def _ordered(points: list[FrontierPoint]) -> list[FrontierPoint]:
    """Sort the strategies in order of first appearance, and their settings by knob."""
    strategies = list(dict.fromkeys(name_of(p.config) for p in points))
    return sorted(points, key=lambda p: (strategies.index(name_of(p.config)), value_of(p.config) or 0.0))


def _closer(bench: _Bench, points: list[FrontierPoint], lag_budgets: Sequence[float]) -> list[FrontierPoint]:
    """Return ``points`` and more around the requested lags: settings of every strategy at those lags, or halfway to the
    neighbours of the recommended one."""
    if not lag_budgets:
        near = _between(advise(points).config, points, bench.setup)
        return [*points, *bench.points("a closer look", near)]
    for number in range(1, MOST_ROUNDS + 1):
        by_name: dict[str, list[FrontierPoint]] = {}
        for point in points:
            by_name.setdefault(name_of(point.config), []).append(point)
        near = [
            config
            for of_strategy in by_name.values()
            for lag in lag_budgets
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
    values = sorted(v for c in known if (v := value_of(c)) is not None)
    place = values.index(here)
    beside = [values[i] for i in (place - 1, place + 1) if 0 <= i < len(values)]
    near = (setting(name_of(config), setup, (here + other) / 2) for other in beside)
    return [c for c in dict.fromkeys(near) if c not in known]


class _Bench:
    """Runs trials over all seeds and pairs them with synchronous rollout."""

    def __init__(self, setup: Setup, length: Length, num_seeds: int, runner: Runner, progress: Progress) -> None:
        self.setup = setup
        self._length = length
        self._seeds = range(num_seeds)
        self._runner = runner
        self._progress = progress
        self._baselines: dict[int, tuple[TrialResult, ...]] = {}
        """Synchronous outcomes by the setup's identity."""

    def points(self, what: str, configs: Sequence[RolloutConfig]) -> list[FrontierPoint]:
        """Return a point for each of ``configs``; the first of the first call must be synchronous."""
        return self._points(what, [(self.setup, config) for config in configs], self._seeds)

    def variations(self, configs: Sequence[RolloutConfig]) -> list[Variation]:
        """Simulate each of ``configs`` with half and twice each assumption, over one seed."""
        setups = list(_varied(self.setup))
        work = [(setup, _moved(config, setup)) for _, _, setup in setups for config in configs]
        names = [(what, value) for what, value, _ in setups for _ in configs]
        points = self._points("sensitivity", work, range(1))
        return [
            Variation(what=what, value=value, point=point) for (what, value), point in zip(names, points, strict=True)
        ]

    def _points(self, what: str, work: Sequence[tuple[Setup, RolloutConfig]], seeds: range) -> list[FrontierPoint]:
        trials = [
            Trial(config=config, seed=seed, lengths=setup.lengths, scenario=setup.scenario)
            for setup, config in work
            for seed in seeds
        ]
        done = run_trials(trials, self._length, self._runner, lambda n: self._progress(what, n, len(trials)))
        points = []
        for place, (setup, config) in enumerate(work):
            outcomes = tuple(done[place * len(seeds) : (place + 1) * len(seeds)])
            if config.strategy.kind == "sync":
                self._baselines.setdefault(id(setup), outcomes)
            baseline = self._baselines[id(setup)]
            points.append(FrontierPoint(config=config, outcomes=outcomes, baseline=baseline, lag_of=setup.lag_of))
        return points


def _varied(setup: Setup) -> list[tuple[str, float, Setup]]:
    """Return (what, value, setup) with half and twice the group size, the cap, and B0."""
    found: list[tuple[str, float, Setup]] = []
    size = setup.rollout.group_size
    for other in (size // 2, 2 * size):
        if other >= 2:
            found.append(("group size", other, replace(setup, rollout=replace(setup.rollout, group_size=other))))
    for cap in (setup.cap_tokens // 2, 2 * setup.cap_tokens):
        if 1 <= cap <= MAX_TOKENS and (cap < setup.cap_tokens or isinstance(setup.lengths, LengthLaw)):
            lengths = setup.lengths.capped(cap)
            found.append(
                ("cap", cap, replace(setup, lengths=lengths, rollout=replace(setup.rollout, max_new_tokens=cap)))
            )
    for factor in (0.5, 2.0):
        replicas = tuple(replace(r, b0=factor * r.b0) for r in setup.scenario.replicas)
        value = sum(r.b0 for r in replicas)
        found.append(("B0", value, replace(setup, scenario=replace(setup.scenario, replicas=replicas))))
    return found


def _moved(config: RolloutConfig, setup: Setup) -> RolloutConfig:
    """Return ``config`` in another setup, with its knob where it was."""
    shape = replace(config, group_size=setup.rollout.group_size, max_new_tokens=setup.cap_tokens)
    return replace(shape, strategy=config.strategy.reshaped(config, shape))
