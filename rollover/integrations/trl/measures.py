"""Measurements of a batch that TRL has prepared for its loss: the engine's distance from the trainer, and tokens that
no gradient reaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollover.integrations.trl.answers import Answers
from rollover.types import Drift, WasteCause


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements from TRL's tensors for a batch.

    Example: ``Measured(drift=Drift(5120, 2e-7), untrained={WasteCause.ZERO_ADVANTAGE: 2048})``
    """

    drift: Drift
    """Over tokens that the current weights sampled; over none if TRL has not computed their log-probs."""
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
    fresh_BT = mask_BT & (_padded(answers.lags, like=mask_BT) == 0)
    if "old_per_token_logps" in output and (num_fresh := int(fresh_BT.sum())):
        distance_BT = (output["old_per_token_logps"] - output["sampling_per_token_logps"]).abs().cpu()
        drift = Drift(num_fresh, float(distance_BT[fresh_BT].mean()))
    return Measured(drift=drift, untrained=_untrained(output, answers, mask_BT, advantages_alone))


def _untrained(
    output: Mapping[str, Any], answers: Answers, mask_BT: Tensor, advantages_alone: bool
) -> Mapping[WasteCause, int]:
    """Count tokens without a gradient by cause, each once: by the cause that comes first in the loss."""
    sampled_BT = _padded(
        [[int(not f)] * len(t) for f, t in zip(answers.failed, answers.lags, strict=True)], like=mask_BT
    )
    left_BT = sampled_BT.bool()
    ratio = output.get("importance_sampling_ratio", torch.ones_like(mask_BT)).cpu()
    rejected = WasteCause.REJECTED_SAMPLE if ratio.shape[1] == 1 else WasteCause.REJECTED_WEIGHT
    causes = [(WasteCause.MASKED_TRUNCATED, ~mask_BT), (rejected, (ratio == 0).expand_as(mask_BT))]
    if advantages_alone:
        zero_B1 = (output["advantages"].cpu() == 0).unsqueeze(1)
        causes.append((WasteCause.ZERO_ADVANTAGE, zero_B1.expand_as(mask_BT)))
    found = {}
    for cause, without_BT in causes:
        if count := int((left_BT & without_BT).sum()):
            found[cause] = count
        left_BT = left_BT & ~without_BT
    return found


def _padded(rows: Sequence[Sequence[int]], *, like: Tensor) -> Tensor:
    padded_BT = torch.zeros(like.shape, dtype=torch.long)
    for b, row in enumerate(rows):
        padded_BT[b, : len(row)] = torch.tensor(row, dtype=torch.long)
    return padded_BT
