"""``kind = "verifier"``: reasoning-gym's own scoring of its task, on the entry that travelled with the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rollover.environments.reasoning_gym import GymDataset, thaw
from rollover.environments.reward_value import usable_reward
from rollover.environments.rewards.base import RewardSample, RewardSpec
from rollover.environments.rewards.extraction import ExtractionSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierConfig(ExtractionSettings):
    """Scores with the verifier that reasoning-gym has for the task; some give part of the points.

    Example: with ``extract = "hashes"``, for an item of ``chain_sum`` whose answer is -4, ``#### -4`` scores 1.0,
    ``#### so -4`` 0.4 and ``#### 41`` 0.0.
    """

    needs_verifier: ClassVar[bool] = True

    kind: Literal["verifier"] = "verifier"
    """``"verifier"`` chooses this reward; so does leaving ``kind`` out. For reasoning-gym sources."""

    def build(self, spec: RewardSpec) -> VerifierReward:
        return VerifierReward(self, spec)


class VerifierReward:
    """Scores with reasoning-gym's ``score_answer``."""

    def __init__(self, config: VerifierConfig, spec: RewardSpec) -> None:
        assert spec.gym_dataset is not None
        self._dataset = GymDataset(spec.gym_dataset, spec.gym_config)
        self._config = config

    def score(self, sample: RewardSample) -> float:
        answer = self._config.answer(sample)
        return usable_reward(self._dataset.score(answer, thaw(sample.columns)), f"verifier of {self._dataset.name!r}")
