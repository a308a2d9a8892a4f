from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest

from rollover.frontier.advice import advise, bound, frontier, instead
from rollover.frontier.settings import settings
from rollover.frontier.sweep import Length, Trial, run_trial
from rollover.settings.schema import build
from rollover.settings.toml import Document
from rollover.sim.run import simulate
from rollover.sim.strategies import SimulatedRollout
from tests.frontier.kit import outcome, point, small

SYNC = point(1.0, 0.0, strategy="sync")
SLOW, KNEE, DEAR, FASTEST = point(1.2, 0.5), point(1.8, 1.0), point(1.7, 1.5), point(2.0, 4.0)
POINTS = [SYNC, FASTEST, SLOW, DEAR, KNEE]


def test_the_frontier_leaves_out_what_is_slower_at_more_lag() -> None:
    assert frontier(POINTS) == [SYNC, SLOW, KNEE, FASTEST]


@pytest.mark.parametrize(("budget", "chosen"), [(0.0, SYNC), (0.4, SYNC), (0.5, SLOW), (1.9, KNEE), (9.0, FASTEST)])
def test_a_budget_gets_the_fastest_setting_within_it(budget: float, chosen: object) -> None:
    assert advise(POINTS, budget).chosen is chosen


def test_without_a_budget_it_is_the_knee() -> None:
    advice = advise(POINTS)
    assert advice.chosen is KNEE
    assert advice.share == pytest.approx(0.8)
    assert "as synchronous rollout at a batch lag of 1.00 versions" in advice.sentence()
    assert "80% of the gain of the fastest setting (april r=2, 2.00 times at 4.00) for 25%" in advice.sentence()


def test_if_no_setting_is_above_the_line_it_is_the_fastest() -> None:
    for gain, chosen in ((1.5, True), (1.004, False)):
        only = point(gain, 0.2)
        assert (advise([SYNC, only]).chosen is only) == chosen
    assert "would train 1.50 times" in instead(SYNC, [SYNC, point(1.5, 0.2)])


def test_a_setting_that_trains_short_responses_is_never_recommended() -> None:
    biased = point(5.0, 0.1, length=0.8)
    assert advise([*POINTS, biased]).chosen is KNEE
    assert advise([*POINTS, biased], 9.0).best is FASTEST
    drifted = replace(biased, baseline=(outcome(trained_length=0.82),))  # the seed's lengths, not the setting's
    assert advise([*POINTS, drifted], 9.0).chosen is drifted


def test_where_nothing_is_faster_than_sync_it_stays() -> None:
    advice = advise([SYNC, point(0.9, 0.3)])
    assert advice.chosen is SYNC
    assert "none of the settings tried is faster" in advice.sentence()
    assert tomllib.loads(advice.toml())["rollout"]["strategy"] == "sync"


def test_a_setting_in_use_is_told_what_no_more_lag_would_gain() -> None:
    assert "would train 1.50 times as many tokens as april r=2, at a batch lag of" in instead(point(0.8, 0.7), POINTS)
    same = "No setting tried would be faster than april r=2 at a batch lag of 1.50 versions or less."
    assert instead(DEAR, [DEAR, SLOW]) == same
    assert "would train 1.80 times as many tokens as sync, at a batch lag of 1.00" in instead(SYNC, POINTS)
    assert "No setting" in instead(SLOW, [SLOW, point(5.0, 0.1, length=0.8)])  # it trains short responses


def test_a_setting_that_trains_single_samples_names_the_advantage_it_needs() -> None:
    advice = advise([SYNC, point(2.0, 0.1, unit="sample")], 9.0)
    snippet = tomllib.loads(advice.toml())
    assert snippet["rollout"]["unit"] == "sample"
    assert snippet["algorithm"]["advantage"] == "history"
    assert "algorithm" not in tomllib.loads(advise([SYNC, point(2.0, 0.1)], 9.0).toml())


def test_what_the_setting_was_told_of_the_engine_is_pasted_with_it() -> None:
    ours = {"strategy": "rollover", "lag_target": 1.0}
    snippet = tomllib.loads(advise([SYNC, point(2.0, 0.1, **ours, prefill_tokens_per_iteration=40.0)], 9.0).toml())
    assert snippet["rollout"]["strategy"]["prefill_tokens_per_iteration"] == 40.0
    assert "prefill_tokens_per_iteration" not in advise([SYNC, point(2.0, 0.1, **ours)], 9.0).toml()


@pytest.mark.parametrize("strategy", ["april", "concurrency", "bounded_async", "sorted", "inflight", "threshold"])
def test_the_recommended_bound_is_never_in_the_way(strategy: str) -> None:
    setup, length = small(), Length(steps=24, warmup=4)
    config = settings(strategy, setup)[-1]
    trial = Trial(config=config, seed=1, lengths=setup.lengths, scenario=setup.scenario)
    found = point(2.0, 1.0)
    found = replace(found, config=config, outcomes=(run_trial(trial, length=length),))
    snippet = tomllib.loads(advise([SYNC, found], 1e9).toml())["rollout"]
    bounded = build(SimulatedRollout, Document(name="", data={**snippet, "max_new_tokens": config.max_new_tokens}))
    assert bounded.staleness_bound == bound(found) >= 1
    free, held = (
        simulate(c.build_strategy(setup.scenario.capabilities), setup.lengths.workload(1), setup.scenario, steps=24)
        for c in (config, bounded)
    )
    settled = 24 - bound(found) - 1  # at the end, what is still open knows no deadline in the free run
    assert held.steps[:settled] == free.steps[:settled]
