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
    """

    late_scores_zero: ClassVar[bool] = False

    kind: Literal["environment"] = "environment"
    """``"environment"`` chooses the environment's own rewards. For sources with an ``environment``."""

    def build(self, spec: RewardSpec) -> EnvironmentReward:
        return EnvironmentReward()


class EnvironmentReward:
    """Adds up rewards of turns."""

    def score(self, sample: RewardSample) -> float:
        return float(sum(message.get("reward") or 0.0 for message in sample.transcript))
