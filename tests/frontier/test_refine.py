"""With a lag asked for, settings are compared at that lag; without one, near the knee."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rollover.frontier.refine import MOST_ROUNDS, TOLERANCE, next_setting
from rollover.frontier.report import _gap, rivals
from rollover.frontier.settings import knob_of, setting, settings, value_of
from rollover.frontier.study import Study, study
from rollover.frontier.sweep import FrontierPoint, Length
from rollover.rollout.config import RolloutConfig
from tests.frontier.kit import outcome, small


def measured(config: RolloutConfig, lag_of: Callable[[float], float], gain: float | None = None) -> FrontierPoint:
    """A made-up measurement: more of the setting is more lag, and more throughput."""
    value = value_of(config) or 0.0
    found = outcome(tokens_per_s=1.0 + value if gain is None else gain, lag=lag_of(value))
    return FrontierPoint(config=config, outcomes=(found,), baseline=(outcome(),))


def refined(name: str, lag: float, lag_of: Callable[[float], float], **changes: float) -> list[FrontierPoint]:
    setup = small()
    points = [measured(c, lag_of, **changes) for c in settings(name, setup)]
    for _ in range(MOST_ROUNDS):
        config = next_setting(points, setup, lag)
        if config is None:
            break
        assert config not in [p.config for p in points], "nothing is tried twice"
        points.append(measured(config, lag_of, **changes))
    return points


CURVES: dict[str, Callable[[float], float]] = {
    "as it says": lambda v: v,
    "less than it says": lambda v: 0.57 * v,
    "more than it says": lambda v: 1.17 * v**1.5,
    "flat, then steep": lambda v: 0.1 * v if v < 0.9 else 0.09 + 2 * (v - 0.9),
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("lag", [0.5, 1.0, 2.7, 5.0])
def test_a_setting_is_turned_until_its_measured_lag_is_the_one_asked_for(curve: str, lag: float) -> None:
    points = refined("rollover", lag, CURVES[curve])
    within = max(p.lag for p in points if p.lag <= lag)
    assert within >= (1 - TOLERANCE) * lag


def test_a_lag_that_is_jumped_over_is_closed_in_on_from_both_sides() -> None:
    def jump(value: float) -> float:
        return 0.57 if value < 1.3 else 1.17

    points = refined("rollover", 1.0, jump)
    values = sorted(value_of(p.config) or 0.0 for p in points)
    below, above = max(v for v in values if v < 1.3), min(v for v in values if v >= 1.3)
    assert above - below < 0.15, "the grid has half a version between them"


@pytest.mark.parametrize("name", ["april", "concurrency", "bounded_async", "sorted"])
def test_whole_numbers_are_tried_until_none_lies_between(name: str) -> None:
    points = refined(name, 1.0, lambda v: v - 0.02)
    key = knob_of(name)
    assert key is not None
    numbers = sorted(p.config.strategy.knob_value(p.config) for p in points)
    lags = {p.config.strategy.knob_value(p.config): p.lag for p in points}
    below = max((n for n in numbers if lags[n] <= 1.0), default=0)
    beyond = [n for n in numbers if lags[n] > 1.0]
    if lags.get(below, 0.0) < 1 - TOLERANCE and beyond:
        least = {"groups": 6, "samples": 0, "plain": 0}[key.scale]
        assert min(beyond) - max(below, least) <= 1


def test_what_no_longer_pays_is_not_turned_up_farther() -> None:
    points = refined("oversample", 4.0, lambda v: 0.2 * v, gain=1.0)
    assert len(points) == len(settings("oversample", small()))


def test_a_bound_is_kept_and_what_has_no_setting_is_left_alone() -> None:
    setup, bounded = small(), small(max_staleness=2)
    points = [measured(c, lambda v: 0.1 * v) for c in settings("april", bounded)]
    assert next_setting(points, bounded, 2.0) is None, "beyond r = 3 a bound of 2 does not reach"
    assert next_setting([measured(setting("sync", setup, None), lambda v: 0.0)], setup, 1.0) is None
    assert next_setting(points, setup, 0.0) is None


@pytest.fixture(scope="module")
def asked() -> Study:
    strategies = ("sync", "april", "concurrency", "bounded_async", "rollover")
    return study(small(), strategies, Length(steps=24, warmup=8), num_seeds=1, lag_budgets=(1.0,))


def test_the_settings_that_a_lag_is_recommended_from_have_that_lag(asked: Study) -> None:
    for name in ("april", "concurrency", "rollover"):
        lags = sorted(p.lag for p in asked.of(name))
        within = max(lag for lag in lags if lag <= 1.0)
        values = sorted(((value_of(p.config) or 0.0), p.lag) for p in asked.of(name))
        above = min(v for v, lag in values if lag > 1.0)
        below = max(v for v, lag in values if v < above)
        assert within >= 1 - TOLERANCE or above - below <= max(1 / 6, 0.02 * above), (name, values)
    assert len(asked.of("bounded_async")) == 5, "nothing lies between whole versions"


def test_a_recommendation_says_what_the_others_reach(asked: Study) -> None:
    said = rivals(asked, asked.advice[0])
    winner = asked.advice[0].config.strategy.kind
    assert said.startswith("Others within this lag: ")
    for name in {"april", "concurrency", "bounded_async", "rollover"} - {winner}:
        assert f"{name} " in said
    assert f"{winner} " not in said and " sync " not in said
    lags = [p.lag for p in asked.of("bounded_async")]
    if max(lag for lag in lags if lag <= 1.0) < 1 - TOLERANCE:
        assert f"(no setting lies between that and {min(lag for lag in lags if lag > 1.0):.2f})" in said
    assert rivals(asked, replace(asked.advice[0], lag_budget=None)) == ""


def test_a_gap_that_short_responses_leave_is_not_called_a_jump() -> None:
    setup = small()

    def made(value: float, lag: float) -> FrontierPoint:
        return measured(setting("rollover", setup, value), lambda _: lag)

    near, biased, beyond = made(0.5, 0.4), made(1.0, 0.98), made(2.0, 2.1)
    assert _gap([near, biased, beyond], near, 1.0) == " (at more lag it trains shorter responses)"
    assert _gap([near, beyond], near, 1.0) == " (no setting lies between that and 2.10)"
    assert _gap([near, biased, beyond], biased, 1.0) == "" == _gap([near], near, 1.0)
