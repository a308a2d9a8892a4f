from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rollover.algorithms import Algorithm
from rollover.algorithms.corrections import correction_factors
from tests.algorithms.batches import WORKED, denominators, f64, gradient, random_batch, row, worked_batch


def factors(algorithm: Algorithm) -> Tensor:
    """Importance weights are (1, 3) in sample 0 and 0.5 in sample 1; staleness is 0, 1, 1."""
    return correction_factors(algorithm, worked_batch()).factor_T


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"correction": "none"}, (1, 1, 1)),
        ({"correction": "mask_stale"}, (1, 0, 0)),
        ({"correction": "tis"}, (1, 2, 0.5)),
        ({"correction": "tis", "correction_bounds": (0.8, 2.5)}, (1, 2.5, 0.8)),
        # product 3 in sample 0, cut at 2
        ({"correction": "tis", "correction_level": "sequence"}, (2, 2, 0.5)),
        # geometric mean sqrt(3)
        ({"correction": "tis", "correction_level": "geometric"}, (3**0.5, 3**0.5, 0.5)),
        ({"correction": "mis"}, (1, 3, 0.5)),
        ({"correction": "mis", "correction_bounds": (0.6, 2)}, (1, 0, 0)),
        # the product decides, the token's own weight is used
        ({"correction": "mis", "correction_level": "sequence", "correction_bounds": (0.5, 2)}, (0, 0, 0.5)),
        ({"correction": "mis", "correction_level": "geometric", "correction_bounds": (0.6, 2)}, (1, 3, 0)),
        ({"guard": (0.4, 1.5)}, (0, 0, 0.5)),
        ({"guard": (0.6, 1.8)}, (1, 2, 0)),
        ({"correction": "none", "guard": (0.6, 1.8)}, (1, 1, 0)),
    ],
)
def test_factor_has_its_hand_worked_value(columns: dict[str, object], expected: tuple[float, ...]) -> None:
    torch.testing.assert_close(factors(row("grpo", **columns)), f64(*expected), rtol=0, atol=1e-12)


def test_masked_tokens_do_not_enter_sequence_weights() -> None:
    tokens = replace(worked_batch(), loss_mask_T=f64(1, 0, 1))
    for level in ("sequence", "geometric"):
        result = correction_factors(row("grpo", correction_level=level), tokens)
        torch.testing.assert_close(result.factor_T, f64(1, 1, 0.5))


@pytest.mark.parametrize("name", ["grpo", "gspo", "rloo", "cispo"])
def test_with_fresh_data_every_correction_is_plain_ppo(name: str) -> None:
    tokens = random_batch(0)
    fresh = replace(
        tokens, rollout_logprobs_T=tokens.proximal_logprobs_T, staleness_T=torch.zeros_like(tokens.staleness_T)
    )
    expected = gradient(row(name, correction="none"), fresh, denominators(fresh))
    variants = [row(name), row(name, correction="mis"), row(name, correction="mask_stale")]
    variants += [row(name, guard=(0.999, 1.001))]
    variants += [row(name, old="rollout", correction="none")] if name != "rloo" else []
    for algorithm in variants:
        torch.testing.assert_close(gradient(algorithm, fresh, denominators(fresh)), expected, rtol=0, atol=1e-12)


def test_single_ratio_form_loses_stale_tokens_before_the_first_update() -> None:
    # weights (1, 3, 0.5) with advantages (1, 1, -1): 3 > 1.2 and 0.5 < 0.8 are clipped at once
    worked = worked_batch()
    tokens = replace(worked, trainer_logprobs_T=worked.proximal_logprobs_T.clone().requires_grad_())
    single = gradient(row("grpo", old="rollout", correction="none"), tokens, WORKED)
    decoupled = gradient(row("grpo"), tokens, WORKED)
    torch.testing.assert_close(single, f64(-1 / 4, 0, 0))
    torch.testing.assert_close(decoupled, f64(-1 / 4, -2 / 4, 0.5 / 2))


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "group-token-mean"])
def test_icepop_rejecting_tokens_leaves_the_gradients_of_the_others_alone(aggregation: str) -> None:
    tokens = random_batch(1)
    icepop = row("grpo", correction="mis", aggregation=aggregation)
    before = gradient(icepop, tokens, denominators(tokens))
    rejected = before.nonzero().flatten()[:3]
    rollout_T = tokens.rollout_logprobs_T.clone()
    rollout_T[rejected] = tokens.proximal_logprobs_T[rejected] - 3.0  # weight e^3 = 20, above 5
    after = gradient(icepop, replace(tokens, rollout_logprobs_T=rollout_T), denominators(tokens))
    kept = torch.ones(len(after), dtype=torch.bool).index_fill(0, rejected, False)
    assert after[rejected].tolist() == [0, 0, 0]
    assert torch.equal(after[kept], before[kept])


def test_no_gradient_flows_through_a_factor() -> None:
    tokens = worked_batch()
    leaking = replace(tokens, proximal_logprobs_T=tokens.trainer_logprobs_T)
    assert not correction_factors(row("grpo"), leaking).factor_T.requires_grad


def test_rejected_tokens_lose_their_kl_term_too() -> None:
    tokens = replace(worked_batch(), advantages_T=f64(0, 0, 0))
    for estimator in ("k2", "k3", "k2_unbiased", "k3_unbiased"):
        masked = row("grpo", correction="mask_stale", kl_coef=1.0, kl_estimator=estimator)
        grad = gradient(masked, tokens, WORKED)
        assert grad[0] != 0
        assert grad[1:].tolist() == [0, 0]
