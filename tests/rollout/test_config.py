"""What a user may not say about the rollout, and what is assumed when she says nothing."""

from __future__ import annotations

from typing import Any

import pytest

from rollover.rollout.config import RolloutConfig
from tests.rollout.kit import NAMES, config_of

KEYS = {
    "over_sampling_batch_size": ({"april", "oversample", "token_budget", "sorted", "tail_rounds"}, 64),
    "drop_surplus": ({"april"}, True),
    "num_running": ({"concurrency", "fast_lane", "bounded_async", "inflight", "threshold", "windowed"}, 64),
    "tokens_per_round": ({"token_budget"}, 100),
    "staleness_threshold": ({"threshold"}, 0.3),
    "window_groups": ({"windowed"}, 40),
    "fast_lane_samples": ({"fast_lane"}, 9),
    "lag_target": ({"rollover"}, 0.5),
    "prefill_tokens_per_iteration": ({"rollover"}, 30.0),
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_key_is_refused_where_it_has_no_effect(name: str, key: str) -> None:
    strategies, value = KEYS[key]
    if name in strategies:
        config_of(name, **{key: value})
        return
    with pytest.raises(
        ValueError, match=f"rollout.{key} has no effect with strategy '{name}'; remove it, or use "
    ) as e:
        config_of(name, **{key: value})
    assert all(other in str(e.value) for other in strategies)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"strategy": "token_budget", "tokens_per_round": 0}, "rollout.tokens_per_round must be at least 1, got 0"),
        ({"strategy": "windowed", "window_groups": 0}, "rollout.window_groups must be at least 1, got 0"),
        ({"strategy": "fast_lane", "fast_lane_samples": -1}, "rollout.fast_lane_samples must be at least 1, got -1"),
        (
            {"strategy": "threshold", "staleness_threshold": -0.1},
            "rollout.staleness_threshold must be at least 0, got -0.1",
        ),
        ({"strategy": "threshold", "staleness_threshold": float("nan")}, "must be at least 0, got nan"),
        (
            {"strategy": "rollover", "prefill_tokens_per_iteration": 0.0},
            "rollout.prefill_tokens_per_iteration must be above 0, got 0.0",
        ),
        ({"strategy": "rollover", "prefill_tokens_per_iteration": float("nan")}, "must be above 0, got nan"),
        ({"strategy": "probe", "max_staleness": 1}, "rollout.max_staleness is 1, but strategy 'probe' is always at 0"),
        (
            {"strategy": "threshold", "staleness_threshold": 1.2, "max_staleness": 1},
            "rollout.max_staleness (1) is below 2, which a threshold of 1.2 for batches of 32 needs;"
            " raise it, or lower rollout.staleness_threshold",
        ),
        (
            {"strategy": "sorted", "over_sampling_batch_size": 128, "max_staleness": 2},
            "rollout.max_staleness (2) is below 3, which 128 groups in flight for batches of 32 need;"
            " raise it, or lower rollout.over_sampling_batch_size",
        ),
    ],
)
def test_what_cannot_work_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as e:
        RolloutConfig(**config)
    assert message in str(e.value)


def test_a_config_that_says_nothing_gets_april_with_twice_the_batch_in_flight() -> None:
    config = RolloutConfig(rollout_batch_size=6)
    assert (config.strategy, config.launched_groups, config.staleness_bound) == ("april", 12, 4)


def test_defaults() -> None:
    config = RolloutConfig(max_new_tokens=1001, rollout_batch_size=6, group_size=3)
    assert (config.round_budget, config.threshold, config.window, config.fast_lane) == (251, 0.5, 6, 3)
    bounds = {name: config_of(name).staleness_bound for name in NAMES}
    assert {name for name, bound in bounds.items() if bound == 0} == {"sync", "probe"}
    assert {name for name, bound in bounds.items() if bound == 1} == {"oversample", "tail_rounds"}
    assert config_of("threshold", staleness_threshold=7.5).staleness_bound == 8
    assert config_of("april", over_sampling_batch_size=32 * 9).staleness_bound == 8


def test_what_is_printed_can_be_read_again() -> None:
    """The complete configuration names every key: at its default, a key is no setting without effect."""
    for name in NAMES:
        assert config_of(name, drop_surplus=False, staleness_threshold=None) == config_of(name)
