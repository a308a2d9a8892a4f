"""Off-policy corrections (TIS, MIS): a constant factor on the loss of each token that an older policy sampled.

The factor is a function of rho = exp(proximal - rollout) log-probs, never carries a gradient, and leaves
every denominator alone: rejecting half the tokens must not double the step on the rest. Rollout log-probs
are the recorded ones, token by token, so a response of several policy versions needs no special case.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollover.algorithms.batch import TokenBatch
from rollover.algorithms.kl import MAX_LOG_RATIO
from rollover.algorithms.registry import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionFactors:
    """Factors on the losses of a micro-batch's tokens; constant, one entry per token unless named otherwise."""

    factor_T: Tensor
    """Multiplies the token's loss; 0 if the token is rejected."""
    rho_T: Tensor
    """Importance weight before bounds."""
    log_weight_B: Tensor
    """Log of the product of rho over each sample's trained tokens."""
    truncated_T: Tensor
    """1.0 if the weight was moved to a bound."""
    rejected_T: Tensor
    """1.0 if the factor is 0."""
    guarded_T: Tensor
    """1.0 if the guard drops the token's sample; such tokens are rejected."""


def correction_factors(algorithm: Algorithm, tokens: TokenBatch) -> CorrectionFactors:
    """Compute the factors of one micro-batch. Truncation in token form at 2 and masking outside (0.5, 5) are the
    defaults; decoupling them from the clip follows Hilton et al. (arXiv 2110.00641)."""
    log_rho_T = (tokens.proximal_logprobs_T - tokens.rollout_logprobs_T).detach()
    log_weight_B = tokens.sum_per_sample(log_rho_T * tokens.loss_mask_T)
    log_mean_B = log_weight_B / trained_tokens_B(tokens)
    rho_T = _exp(log_rho_T)
    factor_T, truncated_T = _bounded(algorithm, tokens, rho_T, log_weight_B, log_mean_B)
    guarded_T = torch.zeros_like(rho_T)
    if algorithm.guard is not None:
        guarded_T = 1 - _inside(_exp(log_mean_B), algorithm.guard)[tokens.sample_T]
        factor_T = factor_T * (1 - guarded_T)
    return CorrectionFactors(
        factor_T=factor_T,
        rho_T=rho_T,
        log_weight_B=log_weight_B,
        truncated_T=truncated_T,
        rejected_T=(factor_T == 0).to(factor_T.dtype),
        guarded_T=guarded_T,
    )


def trained_tokens_B(tokens: TokenBatch) -> Tensor:
    """Return the number of trained tokens of each sample, ``[B]``, at least 1 so that a fully masked sample causes no
    division by 0."""
    return tokens.sum_per_sample(tokens.loss_mask_T).clamp(min=1)


def _bounded(
    algorithm: Algorithm, tokens: TokenBatch, rho_T: Tensor, log_weight_B: Tensor, log_mean_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the factor and the truncation flag of each token, before the guard."""
    untouched_T = torch.zeros_like(rho_T)
    if algorithm.correction == "none":
        return torch.ones_like(rho_T), untouched_T
    if algorithm.correction == "mask_stale":
        return (tokens.staleness_T == 0).to(rho_T.dtype), untouched_T
    level_T = {
        "token": lambda: rho_T,
        "sequence": lambda: _exp(log_weight_B)[tokens.sample_T],
        "geometric": lambda: _exp(log_mean_B)[tokens.sample_T],
    }[algorithm.correction_level]()
    inside_T = _inside(level_T, algorithm.correction_bounds)
    if algorithm.correction == "mis":
        return rho_T * inside_T, untouched_T
    low, high = algorithm.correction_bounds
    return level_T.clamp(low, high), 1 - inside_T


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _inside(x: Tensor, bounds: tuple[float, float]) -> Tensor:
    return ((x >= bounds[0]) & (x <= bounds[1])).to(x.dtype)
