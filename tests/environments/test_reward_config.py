from __future__ import annotations

from typing import Any

import pytest

from rollover.environments.rewards import RewardConfig
from rollover.settings.shape import kinds


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("function", {"function": "m.f"}, "'module:function', got 'm.f'"),
        ("function", {"function": "m:f", "params": {"prompts": []}}, "reward.params.prompts cannot be set"),
        ("verifier", {"extract": "pattern"}, "set both or neither"),
        ("exact", {"answer_pattern": "x"}, "set both or neither"),
        ("exact", {"extract": "pattern", "answer_pattern": "("}, "not a regular expression"),
        ("verifier", {"timeout_s": 0.0}, "reward.timeout_s must be above 0 and finite, got 0.0"),
        ("exact", {"timeout_s": float("nan")}, "reward.timeout_s must be above 0 and finite, got nan"),
        ("math_verify", {"timeout_s": float("inf")}, "reward.timeout_s must be above 0 and finite, got inf"),
        ("exact", {"pass_score": float("nan")}, "reward.pass_score must be a finite number, got nan"),
        ("function", {"function": "m:f", "workers": -1}, "reward.workers"),
        ("math_verify", {"workers": 0}, "only a process can be stopped"),
        ("verifier", {"retries": -1}, "reward.retries"),
    ],
)
def test_a_reward_setting_that_cannot_work_is_refused_by_name(kind: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        kinds(RewardConfig)[kind](**fields)
    assert message in str(caught.value)
