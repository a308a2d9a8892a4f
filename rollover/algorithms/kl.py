"""Estimators of the KL divergence from the trained policy to the reference, one value per token.

With d = log pi - log ref and tokens drawn from pi, the gradient of each value put into a loss has expectation

    k1                      0: no regularisation
    k2, k3_k2grad           grad KL(pi || ref)
    k3                      grad KL(ref || pi), the other direction

and with tokens drawn from any behaviour policy mu, weighted by w = pi / mu, ``k1_unbiased``,
``k2_unbiased`` and ``k3_unbiased`` all give grad KL(pi || ref). The weight carries a gradient for k1 and k3
and must not for k2. The identities hold per state, with the distribution of prefixes held fixed.

However far d is from 0, the gradient has the sign of the unbounded estimator: minimising moves the policy towards the
reference, never away from it. Only its size is bounded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios beyond +-20 are bounded, so that no single token can overflow a batch."""


def bounded_exp(x: Tensor) -> Tensor:
    """Compute ``exp(x)``, continued above ``MAX_LOG_RATIO`` by its tangent.

    A clamp would have gradient 0 there, and a sum with another term (``k3``) would get that term's sign.
    """
    return x.clamp(max=MAX_LOG_RATIO).exp() * (1 + torch.relu(x - MAX_LOG_RATIO))


def kl_estimate(estimator: str, *, trainer_T: Tensor, ref_T: Tensor, rollout_T: Tensor) -> Tensor:
    """Return the KL estimate of each token, ``[T]``, by the estimator of that name; the gradient flows through
    ``trainer_T``."""
    return _ESTIMATORS[estimator](trainer_T, ref_T, rollout_T)


def k3(log_ratio: Tensor) -> Tensor:
    """Compute ``exp(-d) - 1 + d``, which is unbiased for KL when tokens come from the numerator of d, and never
    negative."""
    return bounded_exp(-log_ratio) - 1 + log_ratio


def _k2(trainer_T: Tensor, ref_T: Tensor) -> Tensor:
    return (trainer_T - ref_T) ** 2 / 2


def _k3_k2grad(trainer_T: Tensor, ref_T: Tensor) -> Tensor:
    k2_T = _k2(trainer_T, ref_T)
    return k2_T - k2_T.detach() + k3(trainer_T - ref_T).detach()


def _weight(trainer_T: Tensor, rollout_T: Tensor) -> Tensor:
    return (trainer_T - rollout_T).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _weighted(weight_T: Tensor, value_T: Tensor, slope_T: Tensor, trainer_T: Tensor) -> Tensor:
    """Return the weighted ``value_T`` with the weighted ``slope_T`` as its gradient with respect to ``trainer_T``.

    The slopes of the weighted estimators are written out: d and d + 1 are what is left after terms of exp(-d) cancel,
    and bounded terms would not cancel.
    """
    return (weight_T * value_T).detach() + (weight_T * slope_T).detach() * (trainer_T - trainer_T.detach())


_ESTIMATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "k1": lambda lp, ref, beh: lp - ref,
    "k2": lambda lp, ref, beh: _k2(lp, ref),
    "k3": lambda lp, ref, beh: k3(lp - ref),
    "k3_k2grad": lambda lp, ref, beh: _k3_k2grad(lp, ref),
    "k1_unbiased": lambda lp, ref, beh: _weighted(_weight(lp, beh), lp - ref, lp - ref + 1, lp),
    "k2_unbiased": lambda lp, ref, beh: _weight(lp, beh) * _k2(lp, ref),
    "k3_unbiased": lambda lp, ref, beh: _weighted(_weight(lp, beh), k3(lp - ref), lp - ref, lp),
}
