from __future__ import annotations

from typing import Any

import pytest

from rollover.rollout.old_config import upgraded


@pytest.mark.parametrize(
    ("stored", "now"),
    [
        (
            {"strategy": "april", "over_sampling_batch_size": 64, "drop_surplus": False, "lag_target": None},
            {"strategy": {"kind": "april", "over_sampling_batch_size": 64}},
        ),
        ({"strategy": "rollover", "lag_target": 0.0}, {"strategy": {"kind": "rollover", "lag_target": 0.0}}),
        ({"group_size": 4, "num_running": None}, {"group_size": 4}),
        ({"strategy": {"kind": "april", "drop_surplus": True}}, {"strategy": {"kind": "april", "drop_surplus": True}}),
        ({"num_running": 8}, {"strategy": {"num_running": 8}}),  # of a variant that changes no more than this
    ],
)
def test_options_of_a_strategy_are_put_into_its_table(stored: dict[str, Any], now: dict[str, Any]) -> None:
    assert upgraded(stored) == now
    assert upgraded(now) == now
