"""The policy loss: GRPO, DAPO and GSPO loss (``ppo_clip``), CISPO loss, RLOO loss (``reinforce``), corrected and
aggregated.

The algorithms' rows differ in the objective and in the level of its ratio: GSPO is ``ppo_clip`` with one ratio per
sample (``ratio_level = "sequence"``).

``policy_loss`` gives a micro-batch's share of the loss of the global batch. Shares add up: the sum over any split of
the batch into micro-batches and ranks is the loss of the whole batch, and so are the gradients, because every
denominator counts the global batch. Means are never averaged. A framework that averages gradients over W ranks needs
the share times W.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rollover.algorithms.batch import Denominators, TokenBatch, TokenLosses
from rollover.algorithms.corrections import correction_factors, trained_tokens_B
from rollover.algorithms.kl import bounded_exp, kl_estimate
from rollover.algorithms.metrics import LossMetrics
from rollover.algorithms.registry import Algorithm
from rollover.errors import RolloverError


class LossError(RolloverError, ValueError):
    """A batch that must not be trained on."""

    def __init__(self, message: str, *, sample_index: int | None = None) -> None:
        super().__init__(message)
        self.sample_index = sample_index
        """Place of the offending sample among the B of its micro-batch."""


def policy_loss(algorithm: Algorithm, tokens: TokenBatch, denominators: Denominators) -> tuple[Tensor, LossMetrics]:
    """Compute the scalar share of the global loss, to minimise, and the statistics of this micro-batch.

    ``sum_t weight_t * mask_t * (factor_t * objective_t + kl_coef * kl_t)`` with the weights of
    ``aggregation`` and the factors of ``correction``. Plain KL estimators are multiplied by the factor too; estimators
    that carry their own importance weight are only left out if the factor is 0.

    Raises ``LossError`` for a denominator of 0, tensors whose lengths differ, and log-probs or advantages
    that are not finite (naming the sample).
    """
    _check(tokens, denominators, needs_ref=algorithm.needs_ref)
    correction = correction_factors(algorithm, tokens)
    kept = replace(tokens, loss_mask_T=tokens.loss_mask_T * (1 - correction.rejected_T))
    objective = token_losses(algorithm, kept)
    loss_T = correction.factor_T * objective.loss_T
    if algorithm.kl_coef > 0 and algorithm.kl_in == "loss":
        assert tokens.ref_logprobs_T is not None
        kl_T = kl_estimate(
            algorithm.kl_estimator,
            trainer_T=tokens.trainer_logprobs_T,
            ref_T=tokens.ref_logprobs_T,
            rollout_T=tokens.rollout_logprobs_T,
        )
        own_weight = algorithm.kl_estimator.endswith("_unbiased")
        kl_factor_T = 1 - correction.rejected_T if own_weight else correction.factor_T
        loss_T = loss_T + algorithm.kl_coef * kl_factor_T * kl_T
    weight_T = aggregation_weights(algorithm, tokens, denominators)
    loss = (weight_T * tokens.loss_mask_T * loss_T).sum()
    with torch.no_grad():
        start = token_losses(algorithm, kept, at_start=True)
        metrics = LossMetrics.of(algorithm, tokens, correction, objective, start)
    return loss, metrics


def aggregation_weights(algorithm: Algorithm, tokens: TokenBatch, denominators: Denominators) -> Tensor:
    """Compute the weight of each token in the global loss, ``[T]``."""
    ones_T = torch.ones_like(tokens.rollout_logprobs_T)
    match algorithm.aggregation:
        case "token-mean":
            return ones_T / denominators.num_tokens
        case "seq-mean-token-mean":
            share_T = ones_T if tokens.share_B is None else tokens.share_B[tokens.sample_T]
            return share_T / (denominators.num_samples * trained_tokens_B(tokens)[tokens.sample_T])
        case "seq-mean-token-sum":
            return ones_T / denominators.num_samples
        case "seq-mean-token-sum-norm":
            return ones_T / (denominators.num_samples * denominators.max_response_tokens)
        case "group-token-mean":
            tokens_per_group = ones_T.new_tensor(denominators.tokens_per_group)
            return ones_T / (denominators.num_groups * tokens_per_group[tokens.group_B][tokens.sample_T])


def _check(tokens: TokenBatch, denominators: Denominators, *, needs_ref: bool) -> None:
    counts = (denominators.num_tokens, denominators.num_samples, denominators.num_groups)
    if min(counts) < 1 or denominators.max_response_tokens < 1:
        raise LossError(f"nothing to train on: a denominator of the global batch is 0 in {denominators}")
    num_tokens = len(tokens.sample_T)
    if num_tokens == 0:
        raise LossError(f"the micro-batch of {tokens.num_samples} samples holds no token")
    assert not needs_ref or tokens.ref_logprobs_T is not None, "the KL term needs ref_logprobs_T"
    values = {
        "trainer_logprobs_T": tokens.trainer_logprobs_T,
        "proximal_logprobs_T": tokens.proximal_logprobs_T,
        "rollout_logprobs_T": tokens.rollout_logprobs_T,
        "advantages_T": tokens.advantages_T,
        "ref_logprobs_T": tokens.ref_logprobs_T,
    }
    lengths = {name: x for name, x in values.items() if x is not None}
    for name, x in (
        *lengths.items(),
        ("loss_mask_T", tokens.loss_mask_T),
        ("staleness_T", tokens.staleness_T),
    ):
        if x.shape != (num_tokens,):
            raise LossError(
                f"{name} has shape {tuple(x.shape)} for {num_tokens} tokens of {tokens.num_samples} samples"
            )
    finite_NT = torch.isfinite(torch.stack([x.detach() for x in lengths.values()]))
    if not bool(finite_NT.all()):
        row, place = (~finite_NT).nonzero()[0].tolist()
        sample, name = int(tokens.sample_T[place]), list(lengths)[row]
        raise LossError(
            f"{name} is {lengths[name][place].item()} at token {place}, in the micro-batch's sample {sample}",
            sample_index=sample,
        )


def token_losses(algorithm: Algorithm, tokens: TokenBatch, *, at_start: bool = False) -> TokenLosses:
    """Compute the objective of each token. The loss mask leaves out rejected tokens too, so that no ratio contains
    them. ``at_start`` evaluates the objective at the proximal policy, where the step began."""
    trainer_T = tokens.proximal_logprobs_T if at_start else tokens.trainer_logprobs_T
    old_T = tokens.proximal_logprobs_T if algorithm.old == "proximal" else tokens.rollout_logprobs_T
    log_ratio_T = _log_ratio_at_level(algorithm, tokens, trainer_T, trainer_T - old_T.detach())
    return _FUNCTIONS[algorithm.objective](algorithm, bounded_exp(log_ratio_T), trainer_T, tokens.advantages_T)


def _log_ratio_at_level(algorithm: Algorithm, tokens: TokenBatch, trainer_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    """Return each token's log-ratio at the level that the algorithm compares policies at; for the GSPO loss (arXiv
    2507.18071, sections 4.1 and 4.3), this is the geometric mean over the sample's unmasked tokens."""
    if algorithm.ratio_level == "token":
        return log_ratio_T
    mean_B = tokens.sum_per_sample(log_ratio_T * tokens.loss_mask_T) / trained_tokens_B(tokens)
    if algorithm.ratio_level == "sequence":
        return mean_B[tokens.sample_T]
    return mean_B.detach()[tokens.sample_T] + trainer_T - trainer_T.detach()


Compute = Callable[[Algorithm, Tensor, Tensor, Tensor], TokenLosses]

_FUNCTIONS: dict[str, Compute] = {}


def _objective(compute: Compute) -> Compute:
    """Register the function that computes the row of ``OBJECTIVES`` with its name."""
    _FUNCTIONS[compute.__name__] = compute
    return compute


@_objective
def ppo_clip(algorithm: Algorithm, ratio_T: Tensor, trainer_T: Tensor, advantages_T: Tensor) -> TokenLosses:
    """Compute the GRPO, DAPO and GSPO loss: the pessimistic clipped surrogate (arXiv 1707.06347), with the dual clip of
    arXiv 1912.09729."""
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    negative_T = advantages_T < 0
    loss_T = -torch.minimum(ratio_T * advantages_T, ratio_T.clamp(low, high) * advantages_T)
    dual_T = torch.zeros_like(negative_T)
    if algorithm.dual_clip > 0:
        dual_T = negative_T & (ratio_T > algorithm.dual_clip)
        bound_T = -algorithm.dual_clip * advantages_T
        loss_T = torch.where(negative_T, torch.minimum(loss_T, bound_T), loss_T)
    return TokenLosses(
        loss_T=loss_T,
        ratio_T=ratio_T,
        low_T=negative_T & (ratio_T < low),
        high_T=(advantages_T > 0) & (ratio_T > high),
        dual_T=dual_T,
    )


@_objective
def cispo(algorithm: Algorithm, ratio_T: Tensor, trainer_T: Tensor, advantages_T: Tensor) -> TokenLosses:
    """Compute the CISPO loss (arXiv 2506.13585): log-likelihood weighted by the clipped, detached ratio, so that no
    token loses its gradient."""
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    return TokenLosses(
        loss_T=-ratio_T.detach().clamp(low, high) * advantages_T * trainer_T,
        ratio_T=ratio_T,
        low_T=ratio_T < low,
        high_T=ratio_T > high,
        dual_T=torch.zeros_like(ratio_T, dtype=torch.bool),
    )


@_objective
def reinforce(algorithm: Algorithm, ratio_T: Tensor, trainer_T: Tensor, advantages_T: Tensor) -> TokenLosses:
    """Compute the RLOO loss (arXiv 2402.14740): log-likelihood times advantage, without a ratio."""
    never_T = torch.zeros_like(ratio_T, dtype=torch.bool)
    return TokenLosses(loss_T=-advantages_T * trainer_T, ratio_T=ratio_T, low_T=never_T, high_T=never_T, dual_T=never_T)
