"""What a user may not say about the rollout, and what is assumed when she says nothing."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from rollover.engine.base import Capabilities
from rollover.errors import ConfigError
from rollover.rollout.config import RolloutConfig, strategy
from rollover.rollout.strategies import SIMULATED_ONLY, STRATEGIES, AprilConfig
from rollover.settings.schema import build
from rollover.settings.toml import Document, parse
from rollover.sim.strategies import SIMULATED, SimulatedRollout
from tests.rollout.kit import NAMES, config_of, strategy_of


def test_a_strategy_that_the_engine_cannot_run_is_refused() -> None:
    can = Capabilities(max_running=4, max_context_tokens=64, in_flight_update=True)
    assert strategy("inflight", can).max_staleness > 0
    with pytest.raises(ConfigError, match=r"strategy\('inflight'\) loads weights while .*\.in_flight_update"):
        strategy("inflight", replace(can, in_flight_update=False))


@pytest.mark.parametrize("stray", [{"unit": "sample"}, {"top_p": 0.9}, {"max_retries": 0}])
def test_settings_that_a_strategy_does_not_have_are_refused(stray: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(stray))} is no setting of a strategy"):
        strategy("april", Capabilities(max_running=4, max_context_tokens=64), **stray)


def test_what_the_simulator_alone_can_run_is_said_to_be_so() -> None:
    assert {*SIMULATED} - {*STRATEGIES} == {*SIMULATED_ONLY}
    for kind in SIMULATED_ONLY:
        with pytest.raises(ConfigError) as e:
            build(RolloutConfig, parse(f"strategy = '{kind}'", "run.toml"))
        assert str(e.value).startswith(
            f"run.toml:1: strategy.kind: '{kind}' is not allowed: it is simulated only"
            f" (rollover simulate --strategies {kind}); to train, use '"
        )
        assert str(e.value).rsplit("'", 2)[1] in STRATEGIES
    with pytest.raises(ConfigError, match=r"run\.toml:1: strategy\.kind: 'aprli' is not .*; did you mean 'april'?"):
        build(RolloutConfig, parse("strategy = 'aprli'", "run.toml"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"strategy": "token_budget", "tokens_per_round": 0}, "strategy.tokens_per_round must be at least 1, got 0"),
        ({"strategy": "windowed", "window_groups": 0}, "rollout.strategy.window_groups must be at least 1, got 0"),
        ({"strategy": "fast_lane", "fast_lane_samples": -1}, "strategy.fast_lane_samples must be at least 1, got -1"),
        ({"strategy": "threshold", "staleness_threshold": -0.1}, "staleness_threshold must be at least 0, got -0.1"),
        ({"strategy": "threshold", "staleness_threshold": float("nan")}, "must be at least 0, got nan"),
        ({"strategy": "rollover", "prefill_tokens_per_iteration": 0.0}, "prefill_tokens_per_iteration must be above 0"),
        ({"strategy": "rollover", "prefill_tokens_per_iteration": float("nan")}, "must be above 0, got nan"),
        ({"strategy": "probe", "max_staleness": 1}, "rollout.max_staleness is 1, but strategy 'probe' is always at 0"),
        (
            {"strategy": "threshold", "staleness_threshold": 1.2, "max_staleness": 1},
            "rollout.max_staleness (1) is below 2, which a threshold of 1.2 for batches of 32 needs;"
            " raise it, or lower rollout.strategy.staleness_threshold",
        ),
        (
            {"strategy": "sorted", "over_sampling_batch_size": 128, "max_staleness": 2},
            "rollout.max_staleness (2) is below 3, which 128 groups in flight for batches of 32 need;"
            " raise it, or lower rollout.strategy.over_sampling_batch_size",
        ),
    ],
)
def test_what_cannot_work_is_refused(config: dict[str, Any], message: str) -> None:
    config = dict(config)
    with pytest.raises(ValueError) as e:
        config_of(config.pop("strategy"), **config)
    assert message in str(e.value)


def test_the_default_is_april_with_twice_the_batch_in_flight() -> None:
    config = build(RolloutConfig, parse("rollout_batch_size = 6", "x"))
    assert (config.strategy, config.staleness_bound) == (AprilConfig(), 4)
    assert config.strategy.describe(config) == "12 groups in flight at the start of a round"


def test_defaults() -> None:
    shape = {"max_new_tokens": 1001, "rollout_batch_size": 6, "group_size": 3}
    filled = {
        ("token_budget", "round_budget"): 251,
        ("threshold", "threshold"): 0.5,
        ("windowed", "window"): 6,
        ("fast_lane", "fast_lane"): 3,
        ("rollover", "target_lag"): 1.0,
        ("april", "launched_groups"): 12,
        ("concurrency", "num_running"): 64,
    }
    for (name, field), value in filled.items():
        assert getattr(strategy_of(name, **shape), field) == value
    bounds = {name: config_of(name).staleness_bound for name in SIMULATED}
    assert {name for name, bound in bounds.items() if bound == 0} == {"sync", "probe"}
    assert {name for name, bound in bounds.items() if bound == 1} == {"oversample", "tail_rounds"}
    assert config_of("threshold", staleness_threshold=7.5).staleness_bound == 8
    assert config_of("april", over_sampling_batch_size=32 * 9).staleness_bound == 8


def test_what_is_printed_can_be_read_again() -> None:
    for name in NAMES:
        data = asdict(config_of(name))
        assert build(SimulatedRollout, Document(name="x", data=data)) == config_of(name)
