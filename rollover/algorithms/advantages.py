"""Turns rewards into advantages, once per global batch.

Baselines and whitening see every sample of the batch, masked or not in the loss, whatever the split into
micro-batches. Arithmetic is float64 inside; results have the dtype of the rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from rollover.algorithms.registry import ADVANTAGES, Algorithm
from rollover.errors import DataError
from rollover.types import MAX_REWARD


def shaping(algorithm: Algorithm, limited_B: Tensor, *, max_response_tokens: int) -> Tensor:
    """Return what the algorithm adds to the rewards, the overlong punishment for as many tokens as their limit
    counts, ``[B]``, float64."""
    punishments = [algorithm.overlong_punishment(max_response_tokens, n) for n in limited_B.tolist()]
    return limited_B.new_tensor(punishments, dtype=torch.float64)


def compute_advantages(
    algorithm: Algorithm,
    *,
    rewards_B: Tensor,
    group_B: Tensor,
    sample_T: Tensor,
    loss_mask_T: Tensor,
    baseline_B3: Tensor | None = None,
    components: ComponentRewards | None = None,
    turns: TurnRewards | None = None,
    proximal_logprobs_T: Tensor | None = None,
    ref_logprobs_T: Tensor | None = None,
) -> Tensor:
    """Compute one advantage per response token ``[T]`` of the global batch, in the order of ``sample_T``.

    Args:
        rewards_B: after shaping, one per sample.
        group_B: group of each sample, int64, counted from 0.
        sample_T: sample of each response token, int64, non-decreasing.
        loss_mask_T: 1.0 if the token trains.
        baseline_B3: mean and standard deviation that each sample's reward is compared with, and how many siblings they
            stand for; only ``history`` needs it.
        components: only ``component_std`` needs them.
        turns: for ``turn_std``; without them each response is one turn.
        proximal_logprobs_T, ref_logprobs_T: needed when ``kl_in = "reward"`` and ``kl_coef > 0``, else unused.

    A sample without siblings has no group baseline and gets advantage 0. Raises ``DataError`` for a reward that is not
    within ``MAX_REWARD`` (naming the sample) and for lengths that disagree.
    """
    _check(rewards_B, group_B, sample_T, loss_mask_T)
    kl_T = None
    if algorithm.kl_in == "reward" and algorithm.kl_coef > 0:
        assert proximal_logprobs_T is not None and ref_logprobs_T is not None, "KL in the reward needs both"
        kl_T = algorithm.kl_coef * (proximal_logprobs_T - ref_logprobs_T).detach().double()
    baseline_B3 = None if baseline_B3 is None else baseline_B3.double()
    batch = BatchRewards(
        rewards_B.double(), group_B, sample_T, loss_mask_T.double(), kl_T, baseline_B3, components, turns
    )
    advantages_T = _FUNCTIONS[algorithm.advantage](algorithm, batch)
    if ADVANTAGES[algorithm.advantage].compares == "siblings":
        advantages_T = torch.where(batch.counts_B[sample_T] > 1, advantages_T, 0.0)
    return advantages_T.to(rewards_B.dtype)


class ComponentRewards(NamedTuple):
    """The components of the rewards of ``B`` samples, float64, one column for each of ``K`` names.

    Example: two samples of a source with weights of 1 and 0.5, the second of which lacks the second component, have
    ``values_BK`` of ``((1, 0.2), (0, nan))`` and ``weights_BK`` of ``((1, 0.5), (1, 0.5))``.
    """

    values_BK: Tensor
    """NaN for a component that a sample does not have."""
    weights_BK: Tensor
    shaping_B: Tensor
    """Punishment for the length, which the algorithm adds to the reward."""


class TurnRewards(NamedTuple):
    """The rewards of the turns of ``B`` episodes, float64, with a column for each of ``K`` turns.

    Example: an episode with rewards of 0.1 and 1 and another of a single turn that earned 0 have ``rewards_BK`` of
    ``((0.1, 1), (0, nan))``.
    """

    rewards_BK: Tensor
    """They add up to the sample's reward. NaN for turns that an episode does not have."""
    shaping_B: Tensor
    """Punishment for the length, which counts for the last turn."""
    turn_T: Tensor
    """Turn of each token, counted from 0."""


@dataclass(frozen=True, slots=True)
class BatchRewards:
    """The rewards of a global batch, as advantages compare them.

    Example: for one group with ``rewards_B`` of ``(1, 0, 0, 0)``, ``centred_B`` is ``(0.75, -0.25, -0.25, -0.25)`` and
    ``group_std_B(ddof=1)`` is 0.5.
    """

    rewards_B: Tensor
    group_B: Tensor
    sample_T: Tensor
    mask_T: Tensor
    kl_T: Tensor | None = None
    baseline_B3: Tensor | None = None
    components: ComponentRewards | None = None
    turns: TurnRewards | None = None

    @property
    def counts_B(self) -> Tensor:
        """Return the size of each sample's group."""
        return self._group_sums(torch.ones_like(self.rewards_B))[self.group_B]

    @property
    def centred_B(self) -> Tensor:
        """Return each reward minus the mean of the sample's group, itself included. It is exactly 0 in a group of equal
        rewards, and only there 0 for all."""
        least_G = self.rewards_B.new_full((int(self.group_B.max()) + 1,), torch.inf)
        least_G = least_G.scatter_reduce(0, self.group_B, self.rewards_B, "amin")
        above_B = self.rewards_B - least_G[self.group_B]
        return above_B - self._group_sums(above_B)[self.group_B] / self.counts_B

    def group_std_B(self, ddof: int) -> Tensor:
        squares_B = self._group_sums(self.centred_B**2)[self.group_B]
        return (squares_B / (self.counts_B - ddof).clamp(min=1)).sqrt()

    def _group_sums(self, x_B: Tensor) -> Tensor:
        return x_B.new_zeros(int(self.group_B.max()) + 1).index_add(0, self.group_B, x_B)


Compute = Callable[[Algorithm, BatchRewards], Tensor]

_FUNCTIONS: dict[str, Compute] = {}


def _advantage(compute: Compute) -> Compute:
    """Register the function that computes the row of ``ADVANTAGES`` with its name."""
    _FUNCTIONS[compute.__name__] = compute
    return compute


@_advantage
def group_std(algorithm: Algorithm, batch: BatchRewards) -> Tensor:
    std_B = batch.group_std_B(algorithm.advantage_ddof)
    return (batch.centred_B / (std_B + algorithm.advantage_eps))[batch.sample_T]


@_advantage
def group_mean(algorithm: Algorithm, batch: BatchRewards) -> Tensor:
    return batch.centred_B[batch.sample_T]


@_advantage
def leave_one_out(algorithm: Algorithm, batch: BatchRewards) -> Tensor:
    # R_i - mean of the others = G / (G - 1) * (R_i - mean of all)
    scale_B = batch.counts_B / (batch.counts_B - 1).clamp(min=1)
    return (scale_B * batch.centred_B)[batch.sample_T]


@_advantage
def whitened(algorithm: Algorithm, batch: BatchRewards) -> Tensor:
    """Whiten the reward to go with discount 1: the sample's reward minus the KL of this and all later tokens."""
    to_go_T = batch.rewards_B[batch.sample_T]
    if batch.kl_T is not None:
        to_go_T = to_go_T - _sums_to_go(batch.kl_T * batch.mask_T, batch.sample_T, len(batch.rewards_B))
    return _whiten(algorithm, to_go_T, batch.mask_T)


@_advantage
def group_mean_whitened(algorithm: Algorithm, batch: BatchRewards) -> Tensor:
    has_sibling_T = (batch.counts_B > 1)[batch.sample_T]
    return _whiten(algorithm, batch.centred_B[batch.sample_T], batch.mask_T * has_sibling_T)


@_advantage
def component_std(algorithm: Algorithm, batch: BatchRewards) -> Tensor:
    """Return the advantage of GDPO (arXiv 2601.05242): each component is normalised within its group like the reward of
    ``group_std``, and the weighted sums are divided by their root mean square over the samples of the batch, whose mean
    is 0. Samples that lack a component are not compared in it.
    """
    assert batch.components is not None, "the sources of the run have rewards with components"
    values_BK, weights_BK, shaping_B = batch.components
    sums_B = replace(batch, rewards_B=shaping_B).centred_B
    for values_B, weights_B in zip(values_BK.unbind(1), weights_BK.unbind(1), strict=True):
        present_B = ~values_B.isnan()
        part = replace(batch, rewards_B=values_B[present_B], group_B=batch.group_B[present_B])
        std_B = part.group_std_B(algorithm.advantage_ddof)
        sums_B[present_B] += weights_B[present_B] * part.centred_B / (std_B + algorithm.advantage_eps)
    rms = (sums_B**2).mean().sqrt()
    return (sums_B / (rms + algorithm.advantage_eps))[batch.sample_T]


@_advantage
def turn_std(algorithm: Algorithm, batch: BatchRewards) -> Tensor:
    """Return the advantage of each turn: what the episode has earned from it to the end, compared with what the
    siblings have earned from their turn of the same number on, which is 0 for siblings that had ended.

    Earlier rewards are not in it, since the turn did not change them. The comparison does not depend on what the sample
    did from this turn on, apart from the share 1/G that it has of the mean, as in ``group_std``. All turns of a group
    are divided by one deviation, the root mean square of their distances from the mean. Episodes of one turn have the
    advantage of ``group_std``.
    """
    if batch.turns is None:
        return group_std(algorithm, batch)
    rewards_BK, shaping_B, turn_T = batch.turns
    exists_BK = ~rewards_BK.isnan()
    to_go_BK = torch.where(exists_BK, rewards_BK.nan_to_num().flip(1).cumsum(1).flip(1) + shaping_B[:, None], 0.0)
    centred_BK = torch.stack([replace(batch, rewards_B=column_B).centred_B for column_B in to_go_BK.unbind(1)], 1)
    squares_B = batch._group_sums((centred_BK**2).sum(1))[batch.group_B]
    most_G = exists_BK.new_zeros(int(batch.group_B.max()) + 1, dtype=torch.int64)
    most_G = most_G.scatter_reduce(0, batch.group_B, exists_BK.sum(1), "amax")
    places_B = (batch.counts_B - algorithm.advantage_ddof).clamp(min=1) * most_G[batch.group_B]
    advantages_BK = centred_BK / ((squares_B / places_B).sqrt() + algorithm.advantage_eps)[:, None]
    return advantages_BK[batch.sample_T, turn_T]


@_advantage
def history(algorithm: Algorithm, batch: BatchRewards) -> Tensor:
    """Return the advantage that ``group_std`` would give the sample among ``n`` siblings whose rewards have the mean
    and the deviation of the baseline, which was fixed before the sample began.

    With ``x`` the reward minus the baseline's mean, ``n / (n + 1) x`` is its distance from the mean of all ``n + 1``
    and ``n std^2 + n / (n + 1) x^2`` the sum of their squared distances. Hence ``|advantage| < n / sqrt(n + 1)``
    (with ddof 1), whatever the rewards and their scale: 2.475 for the 7 siblings that a history stands for at most,
    and 0 if nothing was known. It rises with the sample's own reward and depends on nothing else that happens
    after the sample began, so no order of finishing biases it.
    """
    assert batch.baseline_B3 is not None, "only samples that are groups of their own have a baseline from history"
    mean_B, std_B, n_B = batch.baseline_B3.unbind(1)
    centred_B = n_B / (n_B + 1) * (batch.rewards_B - mean_B)
    squares_B = n_B * std_B**2 + centred_B**2 * (n_B + 1) / n_B.clamp(min=1)
    std_of_all_B = (squares_B / (n_B + 1 - algorithm.advantage_ddof).clamp(min=1)).sqrt()
    return (centred_B / (std_of_all_B + algorithm.advantage_eps))[batch.sample_T]


def _sums_to_go(x_T: Tensor, sample_T: Tensor, num_samples: int) -> Tensor:
    """Return the sum of ``x`` from each token to the end of its sample, ``[T]``."""
    before_T = x_T.cumsum(0) - x_T
    totals_B = x_T.new_zeros(num_samples).index_add(0, sample_T, x_T)
    before_sample_B = totals_B.cumsum(0) - totals_B
    return totals_B[sample_T] + before_sample_B[sample_T] - before_T


def _whiten(algorithm: Algorithm, x_T: Tensor, mask_T: Tensor) -> Tensor:
    """Normalise to mean 0 and deviation 1 over the unmasked tokens of the global batch, if there are any."""
    count = mask_T.sum().clamp(min=1)
    above_T = x_T - x_T.where(mask_T > 0, x_T.max()).min()  # exactly 0 if all are equal
    centred_T = above_T - (above_T * mask_T).sum() / count
    variance = (centred_T**2 * mask_T).sum() / (count - algorithm.advantage_ddof).clamp(min=1)
    return centred_T / (variance.sqrt() + algorithm.advantage_eps)


def _check(rewards_B: Tensor, group_B: Tensor, sample_T: Tensor, loss_mask_T: Tensor) -> None:
    if len(rewards_B) != len(group_B):
        raise DataError(f"{len(rewards_B)} rewards for {len(group_B)} samples")
    if len(sample_T) != len(loss_mask_T):
        raise DataError(f"loss_mask_T has {len(loss_mask_T)} entries for {len(sample_T)} tokens")
    bad = (~(rewards_B.abs() <= MAX_REWARD + 1)).nonzero().flatten().tolist()  # shaping subtracts at most 1
    if bad:
        reward = rewards_B[bad[0]].item()
        raise DataError(f"sample {bad[0]} of the batch has reward {reward}: not a finite number within {MAX_REWARD:g}")
