"""A batch in TRL's form, one row for each completion, siblings side by side; and what TRL's tensors of it show: the
engine's distance from the trainer, and tokens that no gradient reaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from rollover.batch import Batch, Drift, WasteCause
from rollover.integrations.trl.prompts import ROW


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The completions of a batch, ``num_generations`` to each prompt. Every field has an entry for each of them.

    A failed sample is represented by a single end token that was not sampled: it has no reward, is masked, and counts
    neither in the mean of its siblings nor in the loss.
    """

    rows: list[int]
    """Row of the dataset for each completion."""
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    """Tokens exactly as they were sampled."""
    logprobs: list[list[float]]
    """Log-prob of each of these tokens under the weights that sampled it."""
    fresh: list[list[bool]]
    """True for each of these tokens that the batch's version sampled, from a cache that it had computed as well."""
    failed: list[bool]

    @property
    def env_mask(self) -> list[list[int]]:
        """Return 1 for tokens that were sampled and 0 for tokens of failed samples."""
        return [[int(not failed)] * len(ids) for ids, failed in zip(self.completion_ids, self.failed, strict=True)]

    @classmethod
    def of(cls, batch: Batch, *, num_generations: int, end_token: int) -> Self:
        """Convert ``batch``. ``end_token`` stands in for samples that failed."""
        answers = cls(rows=[], prompt_ids=[], completion_ids=[], logprobs=[], fresh=[], failed=[])
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
                    answers.fresh.append([False])
                else:
                    answers.completion_ids.append(list(trajectory.token_ids))
                    answers.logprobs.append(list(trajectory.rollout_logprobs))
                    parts = [(s.policy_version == s.kv_version == batch.step, s.token_ids) for s in trajectory.segments]
                    answers.fresh.append([is_fresh for is_fresh, token_ids in parts for _ in token_ids])
        return answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements from TRL's tensors for a batch."""

    drift: Drift
    """Over fresh tokens; over none if TRL has not computed their log-probs."""
    untrained: Mapping[WasteCause, int]


def measure(output: Mapping[str, Any], answers: Answers, *, advantages_alone: bool) -> Measured:
    """Measure a batch from tensors of shape (B, T): B completions in the order of ``answers``, padded on the right.

    Args:
        output: the result of TRL's ``_generate_and_score_completions``.
        advantages_alone: whether a token without an advantage has no gradient, since there is no KL term and no entropy
            bonus.
    """
    mask_BT = output["completion_mask"].bool().cpu()
    if "tool_mask" in output:
        mask_BT &= output["tool_mask"].bool().cpu()
    drift = Drift(0, 0.0)
    fresh_BT = mask_BT & _padded(answers.fresh, like=mask_BT)
    if "old_per_token_logps" in output and (num_fresh := int(fresh_BT.sum())):
        distance_BT = (output["old_per_token_logps"] - output["sampling_per_token_logps"]).abs().cpu()
        drift = Drift(num_fresh, float(distance_BT[fresh_BT].mean()))
    return Measured(drift=drift, untrained=_untrained(output, answers, mask_BT, advantages_alone))


def _untrained(
    output: Mapping[str, Any], answers: Answers, mask_BT: Tensor, advantages_alone: bool
) -> Mapping[WasteCause, int]:
    """Count tokens without a gradient by cause, each once: by the cause that comes first in the loss."""
    left_BT = _padded(answers.env_mask, like=mask_BT)
    ratio = output.get("importance_sampling_ratio", torch.ones_like(mask_BT)).cpu()
    rejected = WasteCause.REJECTED_SAMPLE if ratio.shape[1] == 1 else WasteCause.REJECTED_WEIGHT
    causes = [(WasteCause.MASKED_TRUNCATED, ~mask_BT)]
    if advantages_alone:
        zero_B1 = (output["advantages"].cpu() == 0).unsqueeze(1)
        causes.append((rejected, (ratio == 0).expand_as(mask_BT)))
        causes.append((WasteCause.ZERO_ADVANTAGE, zero_B1.expand_as(mask_BT)))
    found = {}
    for cause, without_BT in causes:
        if count := int((left_BT & without_BT).sum()):
            found[cause] = count
        left_BT = left_BT & ~without_BT
    return found


def _padded(rows: Sequence[Sequence[int]], *, like: Tensor) -> Tensor:
    padded_BT = torch.zeros_like(like)
    for b, row in enumerate(rows):
        padded_BT[b, : len(row)] = torch.tensor(row)
    return padded_BT
