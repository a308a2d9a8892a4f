"""The loss of each token: GRPO, DAPO and GSPO loss (``ppo_clip``), CISPO loss, RLOO loss (``reinforce``).

The algorithms' rows differ in the objective and in the level of its ratio: GSPO is ``ppo_clip`` with one ratio per
sample (``ratio_level = "sequence"``). ``policy_loss`` corrects and aggregates what is computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollover.algorithms.batch import TokenBatch
from rollover.algorithms.corrections import trained_tokens_B
from rollover.algorithms.kl import MAX_LOG_RATIO
from rollover.algorithms.registry import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """The loss of each token before correction and aggregation, with flags for what the clip did to it."""

    loss_T: Tensor
    ratio_T: Tensor
    low_T: Tensor
    """Below the lower clip. ``ppo_clip``: the token has no gradient. ``cispo``: its weight is capped."""
    high_T: Tensor
    dual_T: Tensor


def token_losses(algorithm: Algorithm, tokens: TokenBatch, *, at_start: bool = False) -> TokenLosses:
    """Compute the objective of each token. ``at_start`` evaluates it at the proximal policy, where the step began."""
    trainer_T = tokens.proximal_logprobs_T if at_start else tokens.trainer_logprobs_T
    old_T = tokens.proximal_logprobs_T if algorithm.old == "proximal" else tokens.rollout_logprobs_T
    log_ratio_T = _log_ratio_at_level(algorithm, tokens, trainer_T, trainer_T - old_T.detach())
    ratio_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return _OBJECTIVES[algorithm.objective](algorithm, ratio_T, trainer_T, tokens.advantages_T)


def _log_ratio_at_level(algorithm: Algorithm, tokens: TokenBatch, trainer_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    """The GSPO loss (arXiv 2507.18071, sections 4.1 and 4.3) takes the sample's geometric mean of the ratios."""
    if algorithm.ratio_level == "token":
        return log_ratio_T
    mean_B = tokens.sum_per_sample(log_ratio_T * tokens.loss_mask_T) / trained_tokens_B(tokens)
    if algorithm.ratio_level == "sequence":
        return mean_B[tokens.sample_T]
    return mean_B.detach()[tokens.sample_T] + trainer_T - trainer_T.detach()


def _ppo_clip_loss(algorithm: Algorithm, ratio_T: Tensor, trainer_T: Tensor, advantages_T: Tensor) -> TokenLosses:
    """The GRPO, DAPO and GSPO loss: the pessimistic clipped surrogate (arXiv 1707.06347), with the dual clip of
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


def _cispo_loss(algorithm: Algorithm, ratio_T: Tensor, trainer_T: Tensor, advantages_T: Tensor) -> TokenLosses:
    """The CISPO loss (arXiv 2506.13585): log-likelihood weighted by the clipped, detached ratio, so that no token
    loses its gradient."""
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    return TokenLosses(
        loss_T=-ratio_T.detach().clamp(low, high) * advantages_T * trainer_T,
        ratio_T=ratio_T,
        low_T=ratio_T < low,
        high_T=ratio_T > high,
        dual_T=torch.zeros_like(ratio_T, dtype=torch.bool),
    )


def _reinforce_loss(algorithm: Algorithm, ratio_T: Tensor, trainer_T: Tensor, advantages_T: Tensor) -> TokenLosses:
    """The RLOO loss (arXiv 2402.14740): log-likelihood times advantage, without a ratio."""
    never_T = torch.zeros_like(ratio_T, dtype=torch.bool)
    return TokenLosses(loss_T=-advantages_T * trainer_T, ratio_T=ratio_T, low_T=never_T, high_T=never_T, dual_T=never_T)


_OBJECTIVES: dict[str, Callable[[Algorithm, Tensor, Tensor, Tensor], TokenLosses]] = {
    "ppo_clip": _ppo_clip_loss,
    "cispo": _cispo_loss,
    "reinforce": _reinforce_loss,
}
