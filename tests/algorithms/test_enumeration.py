"""The expected update of each correction, by enumerating every response of a tiny language model.

Token 0 ends a response, each prefix has its own logits, and the data come from several policy versions:
the parameters ``age`` updates ago were ``theta - age * delta * D``, the first token of every response is two
updates old and the rest one. The expected update of a method is the sum over responses of their true
probability times the negative gradient of the package's own loss; the truth is the gradient of the expected
reward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollover.algorithms import Algorithm
from rollover.algorithms.advantages import compute_advantages
from rollover.algorithms.batch import TokenBatch
from rollover.algorithms.losses import policy_loss
from tests.algorithms.batches import denominators, row, token_batch

SUM = {"aggregation": "seq-mean-token-sum"}
UNBOUNDED = {"correction_bounds": (0.0, math.inf)}
NAIVE = row("grpo", correction="none", **SUM)
TOKEN_IS = row("grpo", correction="tis", **UNBOUNDED, **SUM)
TOKEN_TIS = row("grpo", correction="tis", **SUM)
PRODUCT = row("grpo", correction="tis", correction_level="sequence", **UNBOUNDED, **SUM)
MASK_STALE = row("grpo", correction="mask_stale", **SUM)
SEEDS = range(24)


@dataclass(frozen=True)
class World:
    """All responses over a vocabulary, flattened: ``token_T[t]`` was drawn after prefix ``prefix_T[t]``."""

    theta: Tensor
    drift: Tensor
    rewards_B: Tensor
    token_T: Tensor
    prefix_T: Tensor
    sample_T: Tensor
    place_T: Tensor

    @classmethod
    def make(cls, seed: int, vocabulary: int = 3, max_length: int = 3) -> World:
        prefixes: list[tuple[int, ...]] = [()]
        responses: list[tuple[int, ...]] = []
        for prefix in prefixes:
            for token in range(vocabulary):
                longer = (*prefix, token)
                ended = token == 0 or len(longer) == max_length
                (responses if ended else prefixes).append(longer)
        tokens = [(t, prefixes.index(y[:p]), i, p) for i, y in enumerate(responses) for p, t in enumerate(y)]
        rng = np.random.default_rng(seed)
        shape = (len(prefixes), vocabulary)
        return cls(
            torch.from_numpy(0.7 * rng.standard_normal(shape)),
            torch.from_numpy(rng.standard_normal(shape)),
            torch.from_numpy(rng.random(len(responses))),
            *torch.tensor(tokens).T,
        )

    @property
    def num_samples(self) -> int:
        return len(self.rewards_B)

    def logprobs(self, theta: Tensor) -> Tensor:
        return theta.log_softmax(-1)[self.prefix_T, self.token_T]

    def probabilities(self, logprobs_T: Tensor) -> Tensor:
        """[B]: of each response, given the log-probs of its tokens."""
        return logprobs_T.new_zeros(self.num_samples).index_add(0, self.sample_T, logprobs_T).exp()

    def behaviour(self, delta: float, ages_T: Tensor) -> Tensor:
        """[T]: log-prob of each token under the version that sampled it."""
        by_age = [self.logprobs(self.theta - age * delta * self.drift) for age in range(3)]
        return torch.stack(by_age)[ages_T, torch.arange(len(ages_T))]

    @property
    def ages_T(self) -> Tensor:
        return torch.where(self.place_T == 0, 2, 1)

    def true_gradient(self) -> Tensor:
        theta = self.theta.clone().requires_grad_()
        expected_reward = (self.probabilities(self.logprobs(theta)) * self.rewards_B).sum()
        return torch.autograd.grad(expected_reward, theta)[0]

    def tokens(
        self,
        theta: Tensor,
        delta: float,
        *,
        recorded_T: Tensor | None = None,
        ages_T: Tensor | None = None,
        baseline: bool = True,
    ) -> TokenBatch:
        """All responses, by their probability. ``recorded_T`` replaces the log-probs that the method believes in."""
        ages_T = self.ages_T if ages_T is None else ages_T
        sampled_T = self.behaviour(delta, ages_T)
        law_B = self.probabilities(sampled_T)
        value = (law_B * self.rewards_B).sum() if baseline else 0.0
        return token_batch(
            self.logprobs(theta),
            self.sample_T,
            torch.zeros(self.num_samples, dtype=torch.int64),
            rollout_logprobs_T=sampled_T if recorded_T is None else recorded_T,
            # the loss is linear in advantages of one sign, so a response's probability can ride on them
            advantages_T=(law_B * (self.rewards_B - value) * self.num_samples)[self.sample_T],
            staleness_T=ages_T,
        )

    def error(self, algorithm: Algorithm, delta: float, **kwargs: Any) -> float:
        """Distance of the expected ascent direction from the truth."""
        truth, theta = self.true_gradient(), self.theta.clone().requires_grad_()
        tokens = self.tokens(theta, delta, **kwargs)
        loss, _ = policy_loss(algorithm, tokens, denominators(tokens))
        bias = -torch.autograd.grad(loss, theta)[0] - truth
        return float(bias.norm() / truth.norm())


def mean_error(algorithm: Algorithm, delta: float, **kwargs: Any) -> float:
    return float(np.mean([World.make(seed).error(algorithm, delta, **kwargs) for seed in SEEDS]))


def slope(algorithm: Algorithm, seed: int) -> float:
    """Of log error against log lag: 1 means a bias of first order."""
    world = World.make(seed)
    return math.log2(world.error(algorithm, 0.1) / world.error(algorithm, 0.05))


@pytest.mark.parametrize("algorithm", [NAIVE, TOKEN_TIS, PRODUCT], ids=["naive", "tis", "product"])
def test_without_lag_every_method_is_exact(algorithm: Algorithm) -> None:
    assert World.make(0).error(algorithm, 0.0) < 1e-12


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("baseline", [True, False])
def test_full_product_is_exact_under_mixed_versions(seed: int, baseline: bool) -> None:
    assert World.make(seed, 4, 3).error(PRODUCT, 0.4, baseline=baseline) < 1e-12


@pytest.mark.parametrize("algorithm", [NAIVE, TOKEN_IS], ids=["naive", "token-is"])
def test_bias_of_naive_and_of_token_weights_is_of_first_order(algorithm: Algorithm) -> None:
    assert all(0.8 < slope(algorithm, seed) < 1.2 for seed in SEEDS)


@pytest.mark.parametrize(("baseline", "factor"), [(True, 1.2), (False, 3)])
def test_recomputed_log_probs_are_worse_than_token_weights(baseline: bool, factor: float) -> None:
    naive, corrected = (mean_error(algorithm, 0.1, baseline=baseline) for algorithm in (NAIVE, TOKEN_IS))
    assert naive > factor * corrected > 0


def test_one_version_per_response_leaves_a_bias_that_the_record_removes() -> None:
    world = World.make(0)
    newest_T = world.behaviour(0.4, torch.ones_like(world.ages_T))
    assert world.error(PRODUCT, 0.4, recorded_T=newest_T) > 0.1
    assert world.error(PRODUCT, 0.4) < 1e-12


def test_masking_stale_prefixes_loses_their_credit_however_small_the_lag() -> None:
    # first token one update old, the rest fresh: the gradient of the prefix decision is simply missing
    world = World.make(0)
    ages_T = torch.where(world.place_T == 0, 1, 0)
    errors = [world.error(MASK_STALE, delta, ages_T=ages_T) for delta in (0.1, 0.01, 0.001)]
    assert min(errors) > 0.5
    first_order = [world.error(TOKEN_IS, delta, ages_T=ages_T) for delta in (0.1, 0.01, 0.001)]
    assert first_order[2] < first_order[0] / 50


def test_metrics_of_the_naive_update_look_on_policy_but_for_the_warning() -> None:
    world = World.make(0)
    assert world.error(NAIVE, 0.4) > 0.2
    tokens = world.tokens(world.theta, 0.4)
    with pytest.warns(UserWarning, match="stale tokens are trained as if"):
        metrics = policy_loss(NAIVE, tokens, denominators(tokens))[1].finalize()
    assert (metrics["ratio/mean"], metrics["ratio/max"]) == (1.0, 1.0)
    assert metrics["clip/low"] == metrics["clip/high"] == metrics["clip/at_start"] == 0
    assert metrics["warning/stale_uncorrected"] == 1.0


def expected_pair_update(name: str, world: World) -> Tensor:
    """Groups are all pairs of responses, each weighted by its probability."""
    n = world.num_samples
    first, second = (x.flatten() for x in torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij"))
    responses = torch.stack([first, second], dim=1).flatten()
    theta = world.theta.clone().requires_grad_()
    places = torch.cat([(world.sample_T == y).nonzero().flatten() for y in responses.tolist()])
    lengths = torch.bincount(world.sample_T)[responses]
    sample_T = torch.repeat_interleave(torch.arange(2 * n * n), lengths)
    group_B = torch.arange(n * n).repeat_interleave(2)
    trainer_T = world.logprobs(theta)[places]
    p_B = world.probabilities(world.logprobs(world.theta))
    advantages_T = compute_advantages(
        row(name),
        rewards_B=world.rewards_B[responses],
        group_B=group_B,
        sample_T=sample_T,
        loss_mask_T=torch.ones_like(trainer_T),
    )
    weight_B = (p_B[first] * p_B[second] * n * n).repeat_interleave(2)
    tokens = token_batch(trainer_T, sample_T, group_B, advantages_T=weight_B[sample_T] * advantages_T)
    loss, _ = policy_loss(row(name), tokens, denominators(tokens, max_response_tokens=1))
    return -torch.autograd.grad(loss, theta)[0]


def test_rloo_over_all_pairs_is_the_exact_gradient() -> None:
    world = World.make(0)
    torch.testing.assert_close(expected_pair_update("rloo", world), world.true_gradient(), rtol=0, atol=1e-12)


def test_a_baseline_with_the_own_sample_shrinks_the_gradient() -> None:
    # Dr.GRPO with a budget of one token sums tokens over samples, so only the baseline differs from RLOO
    world = World.make(0)
    actual = expected_pair_update("dr-grpo", world)
    torch.testing.assert_close(actual, world.true_gradient() / 2, rtol=0, atol=1e-12)
