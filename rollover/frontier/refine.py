"""Settings whose measured lag is the requested lag.

A strategy's setting does not determine its lag in advance, and a grid of settings jumps over most lags. Of the fastest
settings within a lag, one strategy's may lie just below it and another's far below: comparing them would compare grids.
Every strategy's setting is therefore adjusted until its measured lag is within ``TOLERANCE`` below the requested lag,
or no setting lies between the two around it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from rollover.frontier.settings import Knob, is_allowed, knob_of, name_of, setting, value_of
from rollover.frontier.setup import Setup
from rollover.frontier.sweep import FrontierPoint
from rollover.rollout.config import RolloutConfig

TOLERANCE = 0.05
"""Fraction of the requested lag by which a measured lag may stay below it."""
MOST_ROUNDS = 8
"""Maximum rounds of refinement; each narrows the settings around the lag by a quarter or more."""
_FARTHEST = 1.5
"""Factor by which a setting is raised if none tried has the lag yet."""
_LEAST_STEP = 0.01
"""Relative difference below which two settings count as equal."""
_LEAST: dict[Literal["groups", "samples", "plain"], float] = {"groups": 1.0, "samples": 0.0, "plain": 0.0}
"""The value at which nothing is carried over, by the scale of a knob."""


def next_setting(points: Sequence[FrontierPoint], setup: Setup, lag: float) -> RolloutConfig | None:
    """Choose what to try next of one strategy, whose ``points`` are known; ``None`` where no setting comes closer to
    ``lag`` from below, or none that can pay."""
    name = name_of(points[0].config)
    knob = knob_of(name)
    known = sorted(((v, p) for p in points if (v := value_of(p.config)) is not None), key=lambda pair: pair[0])
    known = [(v, p) for v, p in known if math.isfinite(v)]
    if knob is None or not known or lag <= 0 or any((1 - TOLERANCE) * lag <= p.lag <= lag for _, p in known):
        return None
    tried = {v for v, _ in known}
    for value in _between(known, knob, lag) if any(p.lag > lag for _, p in known) else _beyond(known):
        if is_allowed(name, setup, value):
            config = setting(name, setup, float(f"{value:.3g}"))
            if value_of(config) not in tried:  # it may stand for a whole number of groups that is known
                return config
    return None


def _between(known: Sequence[tuple[float, FrontierPoint]], knob: Knob, lag: float) -> list[float]:
    """Return where the lag would lie if it grew evenly between the settings around it, but close to neither, for it
    may jump; and places to look at should that one be known."""
    place = next(i for i, (_, p) in enumerate(known) if p.lag > lag)
    high, above = known[place][0], known[place][1].lag
    low, below = (known[place - 1][0], known[place - 1][1].lag) if place else (_LEAST[knob.scale], 0.0)
    if high - low <= _LEAST_STEP * high:
        return []
    share = ((1 - TOLERANCE / 2) * lag - below) / (above - below)
    return [low + (high - low) * part for part in (min(max(share, 0.25), 0.75), 0.5, 0.25, 0.75)]


def _beyond(known: Sequence[tuple[float, FrontierPoint]]) -> list[float]:
    """Try farther up, as long as more lag still bought throughput."""
    top = known[-1]
    if len(known) > 1 and (top[1].lag <= known[-2][1].lag or top[1].gain.mean <= known[-2][1].gain.mean):
        return []
    return [top[0] * _FARTHEST]
