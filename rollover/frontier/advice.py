"""From points to a recommendation: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from rollover.frontier.settings import label
from rollover.frontier.sweep import FrontierPoint
from rollover.rollout.config import RolloutConfig
from rollover.rollout.strategies import SIMULATED_ONLY
from rollover.settings.toml import dumps

LEAST_LENGTH = 0.95
"""Minimum trained length, relative to synchronous rollout: a setting that trains shorter responses than it
admits is not recommended, however fast it is."""
_FASTER = 1.005
"""Ratio of throughputs from which on a setting counts as faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A recommended setting, and how much gain its lag costs."""

    chosen: FrontierPoint
    best: FrontierPoint
    """The point of highest throughput, regardless of lag."""
    lag_budget: float | None
    """The lag that the user allows; ``None`` recommends the knee."""

    @property
    def share(self) -> float:
        """Return the chosen setting's fraction of the best gain over synchronous rollout."""
        gained = self.best.gain.mean - 1
        return (self.chosen.gain.mean - 1) / gained if gained > 0 else 1.0

    @property
    def config(self) -> RolloutConfig:
        return self.chosen.config

    def sentence(self) -> str:
        gain = self.chosen.gain
        margin = "" if gain.margin is None else f" ± {gain.margin:.2f}"
        text = f"{label(self.config)} trains {gain.mean:.2f}{margin} times as many tokens as synchronous rollout"
        text += f" at a {self.chosen.lag_of} lag of {self.chosen.lag:.2f} versions"
        if self.chosen is self.best:
            return f"{text}; none of the settings tried is faster."
        lag = f"{self.chosen.lag / self.best.lag:.0%} of the lag" if self.best.lag else "no more lag"
        return (
            f"{text}: {self.share:.0%} of the gain of the fastest setting ({label(self.best.config)},"
            f" {self.best.gain.mean:.2f} times at {self.best.lag:.2f}) for {lag}."
        )

    def toml(self) -> str:
        """Return the setting as part of a run's config, with the lowest staleness bound that never held it back."""
        config, strategy = self.config, self.config.strategy
        values: dict[str, object] = {"rollout_batch_size": config.rollout_batch_size, "group_size": config.group_size}
        if config.unit == "sample":
            values["unit"] = config.unit
        if not strategy.on_policy:
            values["max_staleness"] = bound(self.chosen)
        options = {f.name: getattr(strategy, f.name) for f in fields(strategy)}
        options = {key: value for key, value in options.items() if value is not None and value is not False}
        values["strategy"] = strategy.kind if options.keys() == {"kind"} else options
        algorithm = {"algorithm": {"advantage": "history"}} if config.unit == "sample" else {}
        note = f"# {strategy.kind}: {SIMULATED_ONLY[strategy.kind]}\n" if strategy.kind in SIMULATED_ONLY else ""
        return note + dumps({"rollout": values, **algorithm})


def bound(point: FrontierPoint) -> int:
    """Return the lowest ``max_staleness`` that suffices for the setting and that no simulated token exceeded."""
    if point.config.strategy.on_policy:
        return 0
    return max(point.max_lag, point.config.strategy.staleness_needed(point.config))


def frontier(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """Return the points than which none has more throughput at no more lag, sorted by lag."""
    found: list[FrontierPoint] = []
    for point in sorted(points, key=lambda p: (p.lag, -p.gain.mean)):
        if not found or point.gain.mean > found[-1].gain.mean:
            found.append(point)
    return found


def advise(points: Sequence[FrontierPoint], lag_budget: float | None = None) -> Advice:
    """Return the fastest setting within the budget. Without a budget, return the knee of the frontier: the setting
    farthest above the line from synchronous rollout to the fastest setting (Satopaa et al., 2011), beyond which lag
    buys less than it does on average; the fastest setting itself if none is above that line. Synchronous rollout is
    always among ``points``, so there is one."""
    fair = [p for p in points if is_fair(p)]
    best = frontier(fair)[-1]
    if lag_budget is not None:
        return Advice(chosen=frontier([p for p in fair if p.lag <= lag_budget])[-1], best=best, lag_budget=lag_budget)
    gained = best.gain.mean - 1

    def above_chord(point: FrontierPoint) -> float:
        return (point.gain.mean - 1) * best.lag - point.lag * gained

    by_lag = frontier(fair) if gained < _FASTER - 1 else frontier(fair)[::-1]
    return Advice(chosen=max(by_lag, key=above_chord), best=best, lag_budget=None)


def instead(current: FrontierPoint, points: Sequence[FrontierPoint]) -> str:
    """Return what the fastest of ``points`` gains over the ``current`` setting without more lag; over a setting without
    lag, what the knee gains."""
    at_no_more = [p for p in points if p.lag <= current.lag and is_fair(p)]
    best = max(at_no_more, key=lambda p: p.mean("tokens_per_s")) if current.lag else advise(points).chosen
    ratio = best.mean("tokens_per_s") / current.mean("tokens_per_s")
    name, lag = label(current.config), f"{current.lag_of} lag"
    if ratio < _FASTER:
        at = f" at a {lag} of {current.lag:.2f} versions or less" if current.lag else ""
        return f"No setting tried would be faster than {name}{at}."
    return (
        f"{label(best.config)} would train {ratio:.2f} times as many tokens as {name}, at a {lag} of {best.lag:.2f}"
        f" versions instead of {current.lag:.2f}."
    )


def is_fair(point: FrontierPoint) -> bool:
    """Return True if trained responses are as long as admitted ones, as far as they are for synchronous rollout."""
    pairs = zip(point.outcomes, point.baseline, strict=True)
    return all(o.trained_length >= LEAST_LENGTH * b.trained_length for o, b in pairs)
