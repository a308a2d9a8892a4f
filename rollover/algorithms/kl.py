"""Estimators of the KL divergence from the trained policy to the reference, one value per token.

With d = log pi - log ref and tokens drawn from pi, the gradient of each value put into a loss has expectation

    k1                      0: no regularisation
    k2, k3_k2grad           grad KL(pi || ref)
    k3                      grad KL(ref || pi), the other direction

and with tokens drawn from any behaviour policy mu, weighted by w = pi / mu, ``k1_unbiased``,
``k2_unbiased`` and ``k3_unbiased`` all give grad KL(pi || ref). The weight carries a gradient for k1 and k3
and must not for k2. The identities hold per state, with the distribution of prefixes held fixed.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before ``exp``, so that no single token can overflow a batch."""


def kl_estimate(estimator: str, *, trainer_T: Tensor, ref_T: Tensor, rollout_T: Tensor) -> Tensor:
    """Return the KL estimate of each token, ``[T]``, by the estimator of that name; the gradient flows through
    ``trainer_T``."""
    return _ESTIMATORS[estimator](trainer_T, ref_T, rollout_T)


def k3(log_ratio: Tensor) -> Tensor:
    """Compute ``exp(-d) - 1 + d``, which is unbiased for KL when tokens come from the numerator of d, and never
    negative."""
    return (-log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() - 1 + log_ratio


def _k2(trainer_T: Tensor, ref_T: Tensor) -> Tensor:
    return (trainer_T - ref_T) ** 2 / 2


def _weight(trainer_T: Tensor, rollout_T: Tensor) -> Tensor:
    return (trainer_T - rollout_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _k3_k2grad(trainer_T: Tensor, ref_T: Tensor) -> Tensor:
    k2_T = _k2(trainer_T, ref_T)
    return k2_T - k2_T.detach() + k3(trainer_T - ref_T).detach()


_ESTIMATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "k1": lambda lp, ref, beh: lp - ref,
    "k2": lambda lp, ref, beh: _k2(lp, ref),
    "k3": lambda lp, ref, beh: k3(lp - ref),
    "k3_k2grad": lambda lp, ref, beh: _k3_k2grad(lp, ref),
    "k1_unbiased": lambda lp, ref, beh: _weight(lp, beh) * (lp - ref),
    "k2_unbiased": lambda lp, ref, beh: _weight(lp, beh).detach() * _k2(lp, ref),
    "k3_unbiased": lambda lp, ref, beh: _weight(lp, beh) * k3(lp - ref),
}
