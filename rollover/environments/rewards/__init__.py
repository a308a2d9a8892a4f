"""The kinds of reward, one file each. A new kind is one file and one row of ``RewardConfig``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollover.environments.rewards.base import RewardSpec
from rollover.environments.rewards.episode import EnvironmentRewardConfig
from rollover.environments.rewards.exact import ExactConfig
from rollover.environments.rewards.function import FunctionConfig
from rollover.environments.rewards.judge import JudgeConfig
from rollover.environments.rewards.math_verify import MathVerifyConfig
from rollover.environments.rewards.verifier import VerifierConfig
from rollover.settings.shape import kinds

RewardConfig = (
    VerifierConfig  #
    | ExactConfig
    | MathVerifyConfig
    | FunctionConfig
    | JudgeConfig
    | EnvironmentRewardConfig
)
"""Distinguished by ``kind``; the first is the default."""


def spec_from_json(value: Mapping[str, Any]) -> RewardSpec:
    """Rebuild a spec from its ``asdict`` in JSON."""
    config = kinds(RewardConfig)[value["config"]["kind"]](**value["config"])
    lists = {name: tuple(value[name]) for name in ("columns", "prompt_parts")}
    return RewardSpec(**{**value, "config": config, **lists})
