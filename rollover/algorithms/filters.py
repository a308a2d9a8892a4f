"""Filters of groups (dynamic sampling) and of samples (truncation). No torch.

They decide from rewards and finish reasons alone, never from completion time, so that neither prefers short responses.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollover.algorithms.registry import Algorithm
from rollover.types import FinishReason


def keep_group(algorithm: Algorithm, rewards_G: Sequence[float]) -> bool:
    """Apply DAPO's dynamic sampling (arXiv 2503.14476, section 3.2) to the unshaped rewards of one group: with
    ``group_filter = "zero_signal"`` a group stays iff its rewards differ."""
    return algorithm.group_filter == "none" or len(set(rewards_G)) > 1


def trains_sample(algorithm: Algorithm, finish_reason: FinishReason) -> bool:
    """Say whether the tokens of a sample that ended so have ``loss_mask`` 1."""
    return not (algorithm.mask_truncated and finish_reason is FinishReason.LENGTH)
