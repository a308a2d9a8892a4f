from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollover.errors import ConfigError
from rollover.frontier.settings import (
    DEFAULT_STRATEGIES,
    check_strategies,
    default_strategies,
    knob_of,
    label,
    setting,
    settings,
    value_of,
)
from rollover.rollout.strategies import STRATEGIES, AprilConfig, ConcurrencyConfig, RolloverConfig
from rollover.sim.scenario import Scenario
from rollover.sim.strategies import SIMULATED
from tests.frontier.kit import REPLICA, small


def test_every_strategy_has_its_knob() -> None:
    assert {name for name in SIMULATED if knob_of(name) is None} == {"sync", "probe"}
    assert set(DEFAULT_STRATEGIES) <= set(STRATEGIES)


@pytest.mark.parametrize("strategy", SIMULATED)
def test_settings_differ_and_stand_where_they_say(strategy: str) -> None:
    found = settings(strategy, small())
    assert len(set(found)) == len(found) >= 1
    assert {c.strategy.kind for c in found} == {strategy}
    assert len({label(c) for c in found}) == len(found)
    knob = knob_of(strategy)
    if knob is None:
        assert [value_of(c) for c in found] == [None]
        return
    values = [value_of(c) for c in found]
    assert values == pytest.approx(knob.values, abs=0.5 / 6)  # a whole number of 6 groups or 24 samples


@pytest.mark.parametrize("strategy", SIMULATED)
@pytest.mark.parametrize("bound", [1, 2])
def test_a_staleness_bound_leaves_only_what_is_possible_under_it(strategy: str, bound: int) -> None:
    for config in settings(strategy, small(max_staleness=bound)):
        assert config.strategy.staleness_needed(config) <= config.staleness_bound
        assert config.staleness_bound <= bound


def test_concurrency_is_what_the_engine_can_run_at_most() -> None:
    scenario = Scenario(replicas=(replace(REPLICA, max_running=30),))
    found = [c.strategy for c in settings("concurrency", small(scenario=scenario))]
    assert found == [ConcurrencyConfig(num_running=n) for n in (18, 24, 30)]


def test_values_are_in_units_of_the_batch() -> None:
    config = setting("april", small(), 1.5)
    assert config.strategy == AprilConfig(over_sampling_batch_size=9)
    assert label(config) == "april r=1.5"
    single = setting("april:sample", small(), 1.5)
    assert single == replace(config, unit="sample")
    assert label(single) == "april:sample r=1.5"
    assert label(setting("concurrency", small(), 2.0)) == "concurrency C=48"
    assert label(setting("sync", small(), None)) == "sync"


def test_rollover_is_told_how_fast_a_known_engine_prefills() -> None:
    def told(**changes: Any) -> float | None:
        strategy = setting("rollover", small(**changes), 1.0).strategy
        assert isinstance(strategy, RolloverConfig)
        return strategy.prefill_tokens_per_iteration

    assert told() == 500.0
    assert told(scenario=Scenario(replicas=(REPLICA, REPLICA))) == 1000.0
    assert told(unit="c0") is None, "an assumption is not pasted"
    assert told(scenario=Scenario(replicas=(REPLICA,), kv_on_update="keep")) is None


def test_strategies_are_known_by_name_and_sync_comes_first() -> None:
    assert check_strategies(["april", "sync", "april"], small()) == ("sync", "april")
    with pytest.raises(ConfigError, match="sync cannot train single samples"):
        check_strategies(["sync:sample"], small())
    with pytest.raises(ConfigError, match="'fast_lane' needs a replica for the fast lane"):
        check_strategies(["fast_lane"], small())
    lane = Scenario(replicas=(REPLICA, replace(REPLICA, fast_lane=True)))
    assert check_strategies(["fast_lane"], small(scenario=lane)) == ("sync", "fast_lane")


def test_overlapping_strategies_do_not_take_turns_with_the_trainer() -> None:
    turns = small(scenario=Scenario(replicas=(REPLICA,), colocated=True))
    assert set(default_strategies(small())) - set(default_strategies(turns)) == {"bounded_async"}
    for name in ("bounded_async", "bounded_async:sample", "inflight", "threshold"):
        with pytest.raises(ConfigError, match=f"--strategies: '{name}' generates while the trainer trains"):
            check_strategies([name], turns)
    assert check_strategies(default_strategies(turns), turns)
