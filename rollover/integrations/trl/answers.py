"""A batch in TRL's form: one row for each completion, siblings side by side. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rollover.integrations.trl.prompts import ROW
from rollover.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The completions of a batch, ``num_generations`` to each prompt. Every field has an entry for each of them.

    A failed sample is represented by a single end token that was not sampled: it has no reward, is masked, and counts
    neither in the mean of its siblings nor in the loss.

    Example: a batch of 4 groups with 8 samples each, one of which failed, has 32 entries, of which 31 have ``failed``
    false.
    """

    rows: list[int]
    """Row of the dataset for each completion."""
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    """Tokens exactly as they were sampled."""
    logprobs: list[list[float]]
    """Log-prob of each of these tokens under the weights that sampled it."""
    lags: list[list[int]]
    """Lag of each of these tokens: the batch's version minus the one that sampled it."""
    truncated: list[bool]
    """True if the token budget cut the response off."""
    failed: list[bool]

    @property
    def env_mask(self) -> list[list[int]] | None:
        """Return 1 for tokens that were sampled and 0 for those of failed samples; ``None`` when none has failed."""
        if not any(self.failed):
            return None
        return [[int(not failed)] * len(ids) for ids, failed in zip(self.completion_ids, self.failed, strict=True)]

    @classmethod
    def of(cls, batch: Batch, *, num_generations: int, end_token: int) -> Self:
        """Convert ``batch``. ``end_token`` stands in for samples that failed."""
        answers = cls(rows=[], prompt_ids=[], completion_ids=[], logprobs=[], lags=[], truncated=[], failed=[])
        for group in batch.groups:
            scored = {trajectory.sample_id.index: trajectory for trajectory in group.trajectories}
            assert scored.keys() <= set(range(num_generations)), f"group {group.group_id} has samples beyond its size"
            for index in range(num_generations):
                trajectory = scored.get(index)
                answers.rows.append(int(group.prompt.columns[ROW]))
                answers.prompt_ids.append(list(group.prompt.token_ids))
                answers.failed.append(trajectory is None)
                if trajectory is None:
                    answers.completion_ids.append([end_token])
                    answers.logprobs.append([0.0])
                    answers.lags.append([0])
                    answers.truncated.append(False)
                else:
                    answers.completion_ids.append(list(trajectory.token_ids))
                    answers.logprobs.append(list(trajectory.rollout_logprobs))
                    answers.lags.append([batch.step - version for version in trajectory.policy_versions])
                    answers.truncated.append(trajectory.finish_reason == "length")
        return answers
