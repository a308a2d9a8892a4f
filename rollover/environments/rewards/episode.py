"""``kind = "environment"``: the rewards that the environment of an episode has given its turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rollover.environments.rewards.base import RewardSample, RewardSettings, RewardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRewardConfig(RewardSettings):
    """Adds up what the environment has given for the turns of an episode.

    Example: after answers with rewards of ``-0.1``, ``None`` and ``1.0`` an episode scores 0.9, and 0 if no turn has a
    reward. An agent's program that ends without posting a reward fails its sample; a truncated episode scores 0 then.
    With ``weight = 0`` an episode without any reward is left out of the curve instead.
    """

    late_scores_zero: ClassVar[bool] = False

    kind: Literal["environment"] = "environment"
    """``"environment"`` chooses the environment's own rewards. For sources with an ``environment``."""

    def build(self, spec: RewardSpec) -> EnvironmentReward:
        return EnvironmentReward(is_curve=not self.weight)


class EnvironmentReward:
    """Adds up rewards of turns. ``is_curve``: without any there is no sum."""

    def __init__(self, *, is_curve: bool = False) -> None:
        self._is_curve = is_curve

    def score(self, sample: RewardSample) -> float | None:
        given = [message["reward"] for message in sample.transcript if message.get("reward") is not None]
        return None if self._is_curve and not given else float(sum(given))
