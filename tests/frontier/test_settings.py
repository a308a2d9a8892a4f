from __future__ import annotations

from dataclasses import replace

import pytest

from rollover.errors import ConfigError
from rollover.frontier.settings import DEFAULT_STRATEGIES, KNOBS, check_strategies, label, setting, settings, value_of
from rollover.rollout.strategies import STRATEGIES
from rollover.sim.scenario import Scenario
from tests.frontier.kit import REPLICA, small


def test_every_strategy_has_its_knob() -> None:
    assert set(KNOBS) == set(STRATEGIES)
    assert set(DEFAULT_STRATEGIES) <= set(STRATEGIES)


@pytest.mark.parametrize("strategy", KNOBS)
def test_settings_differ_and_stand_where_they_say(strategy: str) -> None:
    found = settings(strategy, small())
    assert len(set(found)) == len(found) >= 1
    assert {c.strategy for c in found} == {strategy}
    assert len({label(c) for c in found}) == len(found)
    knob = KNOBS[strategy]
    if knob is None:
        assert [value_of(c) for c in found] == [None]
        return
    values = [value_of(c) for c in found]
    assert values == pytest.approx(knob.values, abs=0.5 / 6)  # a whole number of 6 groups or 24 samples


@pytest.mark.parametrize("strategy", KNOBS)
@pytest.mark.parametrize("bound", [1, 2])
def test_a_staleness_bound_leaves_only_what_is_possible_under_it(strategy: str, bound: int) -> None:
    for config in settings(strategy, small(), max_staleness=bound):
        assert config.staleness_needed <= config.staleness_bound
        assert config.staleness_bound <= bound


def test_concurrency_is_what_the_engine_can_run_at_most() -> None:
    scenario = Scenario(replicas=(replace(REPLICA, max_running=30),))
    assert [c.num_running for c in settings("concurrency", small(scenario=scenario))] == [18, 24, 30]


def test_values_are_in_units_of_the_batch() -> None:
    config = setting("april", small(), 1.5)
    assert config.launched_groups == 9
    assert label(config) == "april r=1.5"
    single = setting("april:sample", small(), 1.5)
    assert single == replace(config, unit="sample")
    assert label(single) == "april:sample r=1.5"
    assert label(setting("concurrency", small(), 2.0)) == "concurrency C=48"
    assert label(setting("sync", small(), None)) == "sync"


def test_rollover_is_told_how_fast_a_known_engine_prefills() -> None:
    assert setting("rollover", small(), 1.0).prefill_tokens_per_iteration == 500.0
    two = Scenario(replicas=(REPLICA, REPLICA))
    assert setting("rollover", small(scenario=two), 1.0).prefill_tokens_per_iteration == 1000.0
    assert setting("rollover", small(unit="c0"), 1.0).prefill_tokens_per_iteration is None, (
        "an assumption is not pasted"
    )
    kept = Scenario(replicas=(REPLICA,), kv_on_update="keep")
    assert setting("rollover", small(scenario=kept), 1.0).prefill_tokens_per_iteration is None
    assert setting("april", small(), 1.5).prefill_tokens_per_iteration is None


def test_strategies_are_known_by_name_and_sync_comes_first() -> None:
    assert check_strategies(["april", "sync", "april"], small()) == ("sync", "april")
    with pytest.raises(ConfigError, match="--strategies: no strategy 'aprul'; did you mean 'april'"):
        check_strategies(["aprul"], small())
    with pytest.raises(ConfigError, match="sync waits for whole groups"):
        check_strategies(["sync:sample"], small())
    with pytest.raises(ConfigError, match="'fast_lane' needs a replica for the fast lane"):
        check_strategies(["fast_lane"], small())
    lane = Scenario(replicas=(REPLICA, replace(REPLICA, fast_lane=True)))
    assert check_strategies(["fast_lane"], small(scenario=lane)) == ("sync", "fast_lane")
