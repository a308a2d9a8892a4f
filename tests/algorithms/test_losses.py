"""Hand-worked losses of each row, what tells the rows apart, and gradients."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.algorithms import ALGORITHMS, Algorithm
from rollover.algorithms.batch import TokenBatch
from rollover.algorithms.losses import LossError, policy_loss
from tests.algorithms.batches import (
    WORKED,
    denominators,
    f64,
    gradient,
    random_batch,
    row,
    take,
    token_batch,
    worked_batch,
)

GOLDEN = {
    # Ratios (1.5, 0.9, 0.7), advantages (1, 1, -1), weights (1, 3, 0.5) truncated at 2: factors (1, 2, 0.5).
    # Surrogates clipped to [0.8, 1.2]: -1.2, -0.9, +0.8; times factors -1.2, -1.8, +0.4.
    # Per sample -3.0/2 and 0.4, mean (-1.5 + 0.4) / 2:
    "grpo": -0.55,
    "turn-grpo": -0.55,  # given its advantages, which test_advantages.py works out
    # Upper clip 1.28: -1.28, -1.8, +0.4, over 3 tokens: -2.68 / 3
    "dapo": -0.8933333333,
    # (-1.2 - 1.8 + 0.4) / (2 samples * 4 tokens of budget)
    "dr-grpo": -0.325,
    # Sequence ratios sqrt(1.5 * 0.9) = 1.1619 and 0.7, clipped to 1.0004 and 0.9997; geometric weights
    # sqrt(1 * 3) = 1.7320508 and 0.5: (-1.7320508 * 1.0004 + 0.5 * 0.9997) / 2
    "gspo": -0.6164468,
    "gspo-token": -0.6164468,
    # Log-probs -1 + ln 1.5 = -0.5945349, -2 + ln 0.9 = -2.1053605, -0.5 + ln 0.7 = -0.8566749;
    # -A lp f: 0.5945349 + 4.2107210 - 0.4283375 = 4.3769185, over 2 samples
    "rloo": 2.1884592,
    # (-1.2 - 1.8 + 0.4) / 3; the KL is in the advantages
    "reinforce++": -0.8666667,
    # the same plus 0.01 * (1 * 0.005 + 2 * 0.02 + 0.5 * 0.045) / 3 = 0.000225
    "reinforce++-baseline": -0.8664417,
    # -f min(r, 5) A lp: 1.5 * 0.5945349 + 2 * 0.9 * 2.1053605 - 0.5 * 0.7 * 0.8566749
    # = 0.8918023 + 3.7896489 - 0.2998362 = 4.3816150, over 3 tokens
    "cispo": 1.4605383,
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_row_has_its_hand_worked_loss(name: str) -> None:
    loss, _ = policy_loss(row(name), worked_batch(), WORKED)
    assert loss.item() == pytest.approx(GOLDEN[name], abs=1e-7)


AGGREGATED = {
    # token losses -1.2, -1.8, +0.4 of samples (2, 1 tokens) in group 0 and one more of +3 in group 1
    "token-mean": 0.4 / 4,
    "seq-mean-token-mean": (-1.5 + 0.4 + 3) / 3,
    "seq-mean-token-sum": (-3.0 + 0.4 + 3) / 3,
    "seq-mean-token-sum-norm": (-3.0 + 0.4 + 3) / (3 * 4),
    "group-token-mean": (-2.6 / 3 + 3 / 1) / 2,
}


@pytest.mark.parametrize("aggregation", AGGREGATED)
def test_aggregation_has_its_hand_worked_value(aggregation: str) -> None:
    names = ("trainer_logprobs_T", "proximal_logprobs_T", "rollout_logprobs_T")
    now_T, *others = (torch.cat([getattr(worked_batch(), name), f64(-1)]) for name in names)
    given = {**dict(zip(names[1:], others, strict=True)), "advantages_T": f64(1, 1, -1, -3)}
    tokens = token_batch(now_T, torch.tensor([0, 0, 1, 2]), torch.tensor([0, 0, 1]), **given)
    counts = denominators(tokens, max_response_tokens=4)
    loss, _ = policy_loss(row("grpo", aggregation=aggregation), tokens, counts)
    assert loss.item() == pytest.approx(AGGREGATED[aggregation], abs=1e-12)


DIFFERENTIABLE = [
    row(name) for name in ("grpo", "dapo", "gspo", "dr-grpo", "rloo", "reinforce++", "reinforce++-baseline")
] + [
    row("grpo", kl_coef=0.3, kl_estimator="k3", dual_clip=1.1),
    row("grpo", kl_coef=0.3, kl_estimator="k3_unbiased", correction="mis"),
    row("grpo", kl_coef=0.3, kl_estimator="k1_unbiased", correction="mask_stale"),
    row("dapo", old="rollout", correction="none", aggregation="group-token-mean"),
    row("gspo", clip_low=0.3, clip_high=0.3, guard=(0.8, 1.2)),
]


@pytest.mark.parametrize("algorithm", DIFFERENTIABLE, ids=lambda a: f"{a.name}-{a.correction}-{a.kl_coef}")
@pytest.mark.parametrize("seed", range(3))
def test_gradient_equals_finite_differences(algorithm: Algorithm, seed: int) -> None:
    tokens = random_batch(seed)

    def loss_of(trainer_T: torch.Tensor) -> torch.Tensor:
        return policy_loss(algorithm, replace(tokens, trainer_logprobs_T=trainer_T), denominators(tokens))[0]

    assert torch.autograd.gradcheck(loss_of, (tokens.trainer_logprobs_T,), eps=1e-7, atol=1e-7)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-25.0, -15.0, 15.0, 25.0])
def test_far_ratios_push_in_the_direction_of_the_advantage_or_not_at_all(log_ratio: float, advantage: float) -> None:
    batch = replace(worked_batch(), ref_logprobs_T=None, advantages_T=f64(*3 * [advantage]))
    trainer_T = (batch.proximal_logprobs_T + log_ratio).requires_grad_()
    loss, _ = policy_loss(row("grpo"), replace(batch, trainer_logprobs_T=trainer_T), WORKED)
    (gradient_T,) = torch.autograd.grad(loss, trainer_T)
    clipped = log_ratio * advantage > 0
    assert torch.equal(gradient_T.sign(), torch.zeros(3).double() if clipped else f64(*3 * [-advantage]))


def test_gspo_moves_all_tokens_of_a_sample_by_its_one_ratio() -> None:
    # inside the clip each token's gradient is -s A / (B T) with s = exp(mean(0.0003, -0.0001)) = e^0.0001
    worked = worked_batch()
    tokens = replace(
        worked,
        trainer_logprobs_T=(worked.proximal_logprobs_T + f64(0.0003, -0.0001, 0)).requires_grad_(),
        rollout_logprobs_T=worked.proximal_logprobs_T,
    )
    expected = f64(-math.exp(0.0001) / 4, -math.exp(0.0001) / 4, 0.5)
    torch.testing.assert_close(gradient(row("gspo"), tokens, WORKED), expected, rtol=0, atol=1e-12)
    assert not torch.allclose(gradient(row("grpo"), tokens, WORKED), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["gspo", "gspo-token", "grpo"])
@pytest.mark.parametrize(
    "columns",
    [{"correction": "mask_stale"}, {"correction": "mis", "correction_level": "token", "correction_bounds": (0.6, 2)}],
)
def test_rejected_tokens_neither_move_their_samples_ratio_nor_follow_it(name: str, columns: dict[str, object]) -> None:
    # the first token alone is kept: its ratio of 1.5 is the ratio of its sample, over 2 samples and 2 tokens
    algorithm = row(name, clip_high=0.6, **columns)
    assert gradient(algorithm, worked_batch(), WORKED).tolist() == pytest.approx([-1.5 / 4, 0, 0], abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("clip", [3e-4, 0.3])
def test_gspo_equals_gspo_token_in_value_and_gradient(seed: int, clip: float) -> None:
    tokens = random_batch(seed)
    by_sample, by_token = (row(n, clip_low=clip, clip_high=clip) for n in ("gspo", "gspo-token"))
    values = [policy_loss(a, tokens, denominators(tokens))[0] for a in (by_sample, by_token)]
    assert values[0].item() == pytest.approx(values[1].item(), abs=1e-12)
    grads = [gradient(a, tokens, denominators(tokens)) for a in (by_sample, by_token)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


def test_gspo_token_can_credit_the_tokens_of_a_sample_differently() -> None:
    tokens = random_batch(0, lengths=(2,), num_groups=1)
    tokens = replace(tokens, advantages_T=f64(1, -2), rollout_logprobs_T=tokens.proximal_logprobs_T)
    wide = {"clip_low": 1.0, "clip_high": 9.0}
    grad = gradient(row("gspo-token", **wide), tokens, denominators(tokens))
    assert grad[1] / grad[0] == pytest.approx(-2)
    grad = gradient(row("gspo", **wide), tokens, denominators(tokens))
    assert grad[1] / grad[0] == pytest.approx(1)


def one_token(ratio: float, advantage: float) -> TokenBatch:
    tokens, _ = take(worked_batch(), [1])
    return replace(
        tokens,
        trainer_logprobs_T=(tokens.proximal_logprobs_T + math.log(ratio)).requires_grad_(),
        rollout_logprobs_T=tokens.proximal_logprobs_T,
        advantages_T=f64(advantage),
    )


ONE = replace(WORKED, num_tokens=1, num_samples=1, tokens_per_group=(1,))


@given(ratio=st.floats(0.3, 2.0), advantage=st.sampled_from([-1.5, -0.1, 0.1, 1.5]))
@settings(max_examples=200, deadline=None)
def test_clip_higher_zeroes_the_gradient_exactly_outside_its_two_bounds(ratio: float, advantage: float) -> None:
    tokens = one_token(ratio, advantage)
    clipped = (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
    if min(abs(ratio - 1.28), abs(ratio - 0.8)) > 1e-9:
        assert (gradient(row("dapo"), tokens, ONE).item() == 0) == clipped


def test_dual_clip_bounds_the_loss_of_a_bad_token_gone_likely() -> None:
    # A = -1, ratio 5: PPO's loss 5 grows on, dual clip 3 holds it at 3 with gradient 0; at ratio 2 both agree
    plain, dual = row("grpo"), row("grpo", dual_clip=3.0)
    assert policy_loss(plain, one_token(5, -1), ONE)[0].item() == pytest.approx(5)
    assert policy_loss(dual, one_token(5, -1), ONE)[0].item() == pytest.approx(3)
    assert gradient(dual, one_token(5, -1), ONE).item() == 0
    assert gradient(dual, one_token(2, -1), ONE).item() == pytest.approx(2)
    assert gradient(dual, one_token(0.9, 1), ONE).item() == pytest.approx(-0.9)


@pytest.mark.parametrize(("ratio", "weight"), [(0.05, 0.05), (1.5, 1.5), (8.0, 5.0)])
def test_cispo_caps_the_weight_and_keeps_every_gradient(ratio: float, weight: float) -> None:
    for advantage in (1.0, -1.0):
        grad = gradient(row("cispo"), one_token(ratio, advantage), ONE)
        assert grad.item() == pytest.approx(-weight * advantage)


def test_an_absurd_ratio_neither_overflows_nor_poisons_its_neighbours() -> None:
    worked = worked_batch(advantages=(-1, 1, 1))
    tokens = replace(worked, trainer_logprobs_T=(worked.proximal_logprobs_T + f64(800, 0, 0)).requires_grad_())
    assert torch.isfinite(policy_loss(row("grpo"), tokens, WORKED)[0])
    assert torch.isfinite(gradient(row("grpo"), tokens, WORKED)).all()


@pytest.mark.parametrize(
    "name", ["trainer_logprobs_T", "proximal_logprobs_T", "rollout_logprobs_T", "ref_logprobs_T", "advantages_T"]
)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_value_that_is_not_finite_is_refused_with_its_sample(name: str, value: float) -> None:
    tokens = worked_batch()
    broken = getattr(tokens, name).detach().clone()
    broken[2] = value
    with pytest.raises(LossError, match=f"{name} is {value} at token 2, in the micro-batch's sample 1") as error:
        policy_loss(row("grpo", kl_coef=0.1), replace(tokens, **{name: broken}), WORKED)
    assert error.value.sample_index == 1


@pytest.mark.parametrize("name", ["rollout_logprobs_T", "loss_mask_T", "staleness_T"])
def test_lengths_that_disagree_are_refused_by_name(name: str) -> None:
    tokens = worked_batch()
    with pytest.raises(LossError, match=rf"{name} has shape \(2,\) for 3 tokens of 2 samples"):
        policy_loss(row("grpo"), replace(tokens, **{name: getattr(tokens, name)[:2]}), WORKED)


@pytest.mark.parametrize("name", ["num_tokens", "num_samples", "num_groups", "max_response_tokens"])
def test_a_denominator_of_0_is_refused(name: str) -> None:
    with pytest.raises(LossError, match="nothing to train on"):
        policy_loss(row("grpo"), worked_batch(), replace(WORKED, **{name: 0}))


def test_a_micro_batch_without_tokens_is_refused() -> None:
    batch, _ = take(worked_batch(), [0])
    names = [f.name for f in fields(batch) if f.name.endswith("_T")]
    empty = replace(batch, **{name: each[:0] for name in names if (each := getattr(batch, name)) is not None})
    with pytest.raises(LossError, match="holds no token"):
        policy_loss(row("grpo"), empty, WORKED)


def test_a_fully_masked_micro_batch_is_no_error_and_moves_nothing() -> None:
    tokens = replace(worked_batch(), loss_mask_T=f64(0, 0, 0))
    for name in ALGORITHMS:
        assert gradient(row(name), tokens, WORKED).tolist() == [0, 0, 0]
