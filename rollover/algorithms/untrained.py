"""Untrained tokens: the response tokens that a loss leaves without a gradient, by cause.

A token is untrained when the loss decides so from its data: by a mask, a rejection or an advantage of 0. A token whose
ratio is clipped counts as trained, since training moved it to where the clip stops it; so does one at which the
gradient happens to be 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollover.algorithms.batch import TokenBatch
from rollover.algorithms.corrections import CorrectionFactors
from rollover.algorithms.registry import OBJECTIVES, Algorithm
from rollover.types import WasteCause

CAUSES = (
    WasteCause.MASKED_TRUNCATED,
    WasteCause.MASKED_STALE,
    WasteCause.REJECTED_WEIGHT,
    WasteCause.REJECTED_SAMPLE,
    WasteCause.ZERO_ADVANTAGE,
)


def untrained_causes(algorithm: Algorithm, tokens: TokenBatch, correction: CorrectionFactors) -> Tensor:
    """Return each token's index in ``CAUSES``, ``[T]``, or -1 where it is trained. Of several causes the first in this
    order counts: mask, guard, correction, advantage."""
    masked_T, rejected_T, guarded_T = tokens.loss_mask_T == 0, correction.rejected_T > 0, correction.guarded_T > 0
    by_correction = WasteCause.MASKED_STALE if algorithm.correction == "mask_stale" else WasteCause.REJECTED_WEIGHT
    causes_T = torch.full_like(tokens.sample_T, CAUSES.index(WasteCause.ZERO_ADVANTAGE))
    causes_T[rejected_T] = CAUSES.index(by_correction)
    causes_T[guarded_T] = CAUSES.index(WasteCause.REJECTED_SAMPLE)
    causes_T[masked_T] = CAUSES.index(WasteCause.MASKED_TRUNCATED)
    return causes_T.masked_fill(_has_gradient(algorithm, tokens, ~(masked_T | rejected_T)), -1)


def _has_gradient(algorithm: Algorithm, tokens: TokenBatch, admitted_T: Tensor) -> Tensor:
    """Return for each token ``[T]`` whether the loss has a slope at its log-prob. ``admitted_T``: neither masked nor
    rejected."""
    by_reward_T = admitted_T & (tokens.advantages_T != 0)
    if algorithm.ratio_level == "sequence" and OBJECTIVES[algorithm.objective].trains_ratio:
        # One ratio for the whole sample: each of its unmasked tokens moves the loss of all the others.
        by_reward_B = tokens.sum_per_sample(by_reward_T.to(tokens.loss_mask_T.dtype)) > 0
        by_reward_T = (tokens.loss_mask_T > 0) & by_reward_B[tokens.sample_T]
    if algorithm.kl_coef > 0 and algorithm.kl_in == "loss":
        return admitted_T | by_reward_T
    return by_reward_T
