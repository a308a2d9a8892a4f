"""The estimators at one state with five tokens: values and gradients in expectation, by enumeration."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollover.algorithms.kl import kl_estimate

GENERATOR = torch.Generator().manual_seed(0)
LOGITS, REF_LOGITS, ROLLOUT_LOGITS = torch.randn(3, 5, generator=GENERATOR, dtype=torch.float64)
REF = REF_LOGITS.log_softmax(0)


def expectation(estimator: str, *, drawn_from: Tensor) -> tuple[Tensor, Tensor]:
    """Value and gradient with respect to the policy's logits, tokens drawn from ``drawn_from``."""
    logits = LOGITS.clone().requires_grad_()
    values = kl_estimate(estimator, trainer_T=logits.log_softmax(0), ref_T=REF, rollout_T=drawn_from)
    value = (drawn_from.exp() * values).sum()
    return value.detach(), torch.autograd.grad(value, logits)[0]


def kl_and_gradient(*, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """KL(pi || ref) and its gradient; ``reverse``: KL(ref || pi)."""
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(0)
    kl = (REF.exp() * (REF - policy)).sum() if reverse else (policy.exp() * (policy - REF)).sum()
    return kl.detach(), torch.autograd.grad(kl, logits)[0]


def same(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=0, atol=1e-12)


POLICY = LOGITS.log_softmax(0)
ROLLOUT = ROLLOUT_LOGITS.log_softmax(0)


def test_the_policies_differ_enough_for_wrong_directions_to_show() -> None:
    assert not same(kl_and_gradient()[1], kl_and_gradient(reverse=True)[1])
    assert not same(expectation("k2", drawn_from=ROLLOUT)[1], kl_and_gradient()[1])


KL_TO_REF = kl_and_gradient()[1]
ON_POLICY = {
    "k1": (True, torch.zeros_like(LOGITS)),  # in the loss it regularises nothing
    "k2": (False, KL_TO_REF),
    "k3": (True, kl_and_gradient(reverse=True)[1]),
    "k3_k2grad": (True, KL_TO_REF),
}
"""Whether the value is that of the KL from the policy to the reference, and the gradient."""


@pytest.mark.parametrize("estimator", ON_POLICY)
def test_an_estimator_has_its_value_and_its_gradient_on_policy(estimator: str) -> None:
    value, gradient = expectation(estimator, drawn_from=POLICY)
    is_unbiased, expected = ON_POLICY[estimator]
    assert same(value, kl_and_gradient()[0]) == is_unbiased
    assert same(gradient, expected)


@pytest.mark.parametrize("estimator", ["k1_unbiased", "k2_unbiased", "k3_unbiased"])
def test_weighted_estimators_are_unbiased_under_any_behaviour_policy(estimator: str) -> None:
    assert same(expectation(estimator, drawn_from=ROLLOUT)[1], kl_and_gradient()[1])


FAR = [sign * d for d in (15.0, 19.9, 20.1, 25.0, 30.0) for sign in (1, -1)]


@pytest.mark.parametrize("log_weight", [0.0, 3.0, 25.0, -25.0])
def test_far_from_the_reference_the_gradient_still_points_to_it(log_weight: float) -> None:
    """Against the unbounded estimators in closed form: equal sign everywhere, equal value within the bound."""
    ref = torch.zeros(len(FAR), dtype=torch.float64)
    d = torch.tensor(FAR, dtype=torch.float64)
    weight = torch.tensor(log_weight, dtype=torch.float64).exp()
    exact = {
        "k2": d,
        "k3": 1 - (-d).exp(),
        "k3_k2grad": d,
        "k1_unbiased": weight * (d + 1),
        "k2_unbiased": weight * d,
        "k3_unbiased": weight * d,
    }
    for estimator, slope in exact.items():
        trainer = d.clone().requires_grad_()
        value = kl_estimate(estimator, trainer_T=trainer, ref_T=ref, rollout_T=d - log_weight)
        (gradient,) = torch.autograd.grad(value.sum(), trainer)
        assert torch.equal(gradient.sign(), slope.sign()), estimator
        bounded = estimator == "k3"
        near = d.abs() <= 20 if bounded else torch.full_like(d, abs(log_weight) <= 20, dtype=torch.bool)
        assert torch.allclose(gradient[near], slope[near], rtol=1e-12), estimator


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_values_and_gradients_agree_by_finite_differences(estimator: str) -> None:
    ref, step = torch.zeros(len(FAR), dtype=torch.float64), 1e-6
    d = torch.tensor(FAR, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(kl_estimate(estimator, trainer_T=d, ref_T=ref, rollout_T=d).sum(), d)
    above, below = (kl_estimate(estimator, trainer_T=d.detach() + e, ref_T=ref, rollout_T=d) for e in (step, -step))
    assert torch.allclose((above - below) / (2 * step), gradient, rtol=1e-6)


def test_an_absurd_log_ratio_stays_finite() -> None:
    far = torch.tensor([-300.0], dtype=torch.float64)
    for estimator in ("k3", "k1_unbiased", "k3_unbiased"):
        assert torch.isfinite(kl_estimate(estimator, trainer_T=far, ref_T=-far * 0, rollout_T=far * 2)).all()
