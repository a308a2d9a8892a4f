from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rollover.algorithms import ALGORITHMS, Algorithm
from rollover.algorithms.advantages import ComponentRewards, TurnRewards, compute_advantages, shaping
from rollover.algorithms.registry import ADVANTAGES
from rollover.batch import Baseline
from rollover.errors import DataError
from rollover.rollout.reward_history import RewardHistory
from rollover.types import Prompt
from tests.algorithms.batches import f64, row

GROUP_B = torch.tensor([0, 0, 0, 1, 1])
REWARDS_B = f64(1, 0, 0, 3, 1)
"""Group 0: mean 1/3, squared deviations 4/9 + 1/9 + 1/9 = 2/3. Group 1: mean 2, squared deviations 1 + 1."""


def advantages(
    algorithm: Algorithm,
    rewards_B: Tensor = REWARDS_B,
    group_B: Tensor = GROUP_B,
    *,
    sample_T: Sequence[int] | None = None,
    mask_T: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """By default of one token a sample, none of them masked."""
    places_T = torch.arange(len(rewards_B)) if sample_T is None else torch.tensor(sample_T)
    loss_mask_T = torch.ones(len(places_T), dtype=torch.float64) if mask_T is None else mask_T
    batch = {"rewards_B": rewards_B, "group_B": group_B, "sample_T": places_T, "loss_mask_T": loss_mask_T}
    return compute_advantages(algorithm, **batch, **more)


CENTRED = f64(2 / 3, -1 / 3, -1 / 3, 1, -1)


@pytest.mark.parametrize(
    ("algorithm", "expected", "within"),
    [
        # s_0 = sqrt((2/3) / 2) = 0.577350, s_1 = sqrt(2 / 1) = 1.414214
        (row("grpo"), CENTRED / f64(0.57735027, 0.57735027, 0.57735027, 2**0.5, 2**0.5), 3e-6),
        # s_0 = sqrt((2/3) / 3) = 0.471405, s_1 = sqrt(2 / 2) = 1; eps 0.5 in the divisor
        (
            row("grpo", advantage_ddof=0, advantage_eps=0.5),
            CENTRED / f64(0.9714045208, 0.9714045208, 0.9714045208, 1.5, 1.5),
            1e-9,
        ),
        (row("dr-grpo"), CENTRED, 1e-12),
        # mean 1, squared deviations 0 + 1 + 1 + 4 + 0 = 6, variance 6 / 4
        (row("reinforce++", kl_coef=0.0, advantage_eps=1e-12, advantage_ddof=1), f64(0, -1, -1, 2, 0) / 1.5**0.5, 1e-9),
        # sample 0: 1 - (0 + 0)/2; sample 1: 0 - (1 + 0)/2; sample 3: 3 - 1; sample 4: 1 - 3
        (row("rloo"), f64(1, -0.5, -0.5, 2, -2), 1e-12),
    ],
    ids=["group_std", "ddof 0 and eps", "group_mean", "whitened", "leave_one_out"],
)
def test_an_advantage_has_its_hand_worked_value(algorithm: Algorithm, expected: Tensor, within: float) -> None:
    torch.testing.assert_close(advantages(algorithm), expected, rtol=0, atol=within)


def test_reinforce_plus_plus_subtracts_the_kl_of_this_and_later_tokens() -> None:
    # rewards to go with beta 0.1 and KL (0.2, 0.4 | -0.5): 1 - 0.06 = 0.94, 1 - 0.04 = 0.96, 0 + 0.05 = 0.05
    # mean 0.65; deviations 0.29, 0.31, -0.6; variance (0.0841 + 0.0961 + 0.36) / 3 = 0.18006667
    ref_T = f64(-1, -2, -3)
    policies = {"proximal_logprobs_T": ref_T + f64(0.2, 0.4, -0.5), "ref_logprobs_T": ref_T}
    algorithm = row("reinforce++", kl_coef=0.1)
    actual = advantages(algorithm, f64(1, 0), torch.tensor([0, 1]), sample_T=[0, 0, 1], **policies)
    torch.testing.assert_close(actual, f64(0.29, 0.31, -0.6) / math.sqrt(0.5402 / 3), rtol=0, atol=1e-5)


def test_reinforce_plus_plus_whitens_over_trained_tokens_only() -> None:
    # trained: rewards 1, 1 (sample 0) and 0 (sample 2): mean 2/3, variance (1/9 + 1/9 + 4/9) / 3 = 2/9;
    # the masked sample's KL of 5 counts nowhere and its own value is (9 - 2/3) / sqrt(2/9)
    policies = {"proximal_logprobs_T": f64(0, 0, 5, 0), "ref_logprobs_T": f64(0, 0, 0, 0)}
    tokens = {"sample_T": [0, 0, 1, 2], "mask_T": f64(1, 1, 0, 1)}
    actual = advantages(row("reinforce++", kl_coef=1.0), f64(1, 9, 0), torch.tensor([0, 0, 0]), **tokens, **policies)
    expected = f64(1 / 3, 1 / 3, 25 / 3, -2 / 3) / math.sqrt(2 / 9)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_equal_rewards_are_exactly_0_when_whitened() -> None:
    """The mean of 19 times 0.1 is not 0.1 in floating point. The last token is masked."""
    tokens = {"sample_T": [0] * 3 + [1] * 4 + [2] * 5 + [3] * 7 + [4], "mask_T": f64(*[1] * 19, 0)}
    actual = advantages(row("reinforce++", kl_coef=0.0), f64(0.1, 0.1, 0.1, 0.1, -5), **tokens)
    assert actual[:19].tolist() == [0.0] * 19 and actual[19] < 0


def test_its_baseline_centres_in_the_group_and_whitens_over_the_batch() -> None:
    # centred rewards 0.5, -0.5 | 2, -2 on 1, 1, 1, 3 tokens: mean -4/6 = -2/3,
    # squares 0.25 + 0.25 + 4 + 12 = 16.5, variance 16.5/6 - 4/9 = 2.305556
    groups, tokens = torch.tensor([0, 0, 1, 1, 2]), [0, 1, 2, 3, 3, 3, 4]  # the last sample has no sibling
    actual = advantages(row("reinforce++-baseline"), f64(1, 0, 5, 1, 9), groups, sample_T=tokens)
    expected = (f64(0.5, -0.5, 2, -2, -2, -2) + 2 / 3) / math.sqrt(16.5 / 6 - 4 / 9)
    torch.testing.assert_close(actual, torch.cat([expected, f64(0)]), rtol=0, atol=1e-5)


def test_masked_samples_stay_in_the_baseline() -> None:
    rewards_B, mask_T = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0, 0.0])
    actual = advantages(row("dr-grpo"), rewards_B, torch.tensor([0, 0]), sample_T=[0, 0, 1], mask_T=mask_T)
    assert actual.dtype == torch.float32
    assert actual.tolist() == [0.5, 0.5, -0.5]


def test_soft_overlong_punishment_falls_to_minus_1_over_the_buffer() -> None:
    # budget 100, buffer 0.2 * 100 = 20 tokens: 0 up to 80, -1/2 at 90, -1 at 100
    lengths = torch.tensor([1, 80, 85, 90, 95, 100])
    punished, alone = (shaping(row(name), lengths, max_response_tokens=100) for name in ("dapo", "grpo"))
    torch.testing.assert_close(punished, f64(0, 0, -0.25, -0.5, -0.75, -1), rtol=0, atol=1e-12)
    assert alone.tolist() == [0] * 6


def test_a_reward_that_is_not_finite_is_refused_with_its_sample() -> None:
    with pytest.raises(DataError, match="sample 1 of the batch has reward nan"):
        advantages(row("grpo"), rewards_B=f64(1, math.nan), group_B=torch.tensor([0, 0]))


def test_lengths_that_disagree_are_refused() -> None:
    with pytest.raises(DataError, match="5 rewards for 4 samples"):
        advantages(row("grpo"), group_B=GROUP_B[:4])


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_batch_in_which_every_token_is_masked_has_finite_advantages(name: str) -> None:
    policies = {"proximal_logprobs_T": f64(-1, -2), "ref_logprobs_T": f64(-1, -1)}
    actual = advantages(row(name), f64(1, 0), torch.tensor([0, 0]), mask_T=f64(0, 0), **policies)
    assert bool(actual.isfinite().all())


# -- history --------------------------------------------------------------------------------------------------------


def by_history(rewards: list[float], baselines: list[Baseline], **columns: object) -> list[float]:
    algorithm, baseline_B3 = row("grpo", advantage="history", **columns), torch.tensor(baselines, dtype=torch.float64)
    return advantages(algorithm, f64(*rewards), torch.arange(len(rewards)), baseline_B3=baseline_B3).tolist()


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("reward", [1e-3, 1.0, 0.0, 0.3, 40.0, 1e6])
@pytest.mark.parametrize("before", [(1, 0, 0, 1, 1, 0.5, 0), (0,) * 7, (0,)], ids=["seven", "seven zeros", "one zero"])
def test_history_equals_grpo_of_that_mean_and_deviation(before: tuple[float, ...], reward: float, ddof: int) -> None:
    siblings = f64(*before)
    baseline = Baseline(siblings.mean().item(), siblings.std(correction=0).item(), len(siblings))
    group = torch.cat([f64(reward), siblings])
    grpo = advantages(row("grpo", advantage_ddof=ddof), rewards_B=group, group_B=torch.zeros_like(group).long())
    assert by_history([reward], [baseline], advantage_ddof=ddof) == pytest.approx([grpo[0].item()], rel=1e-9)


def advantages_over_time(rewards: list[float]) -> list[float]:
    history, baselines = RewardHistory(), []
    for i, reward in enumerate(rewards):
        made = Prompt(prompt_id=f"toy/{i}@0", token_ids=(1,), text="", source="toy")
        baselines.append(history.baseline(made))
        history.add(made, reward)
    return by_history(rewards, baselines)


def test_constant_rewards_have_advantage_zero_from_the_first_to_the_last() -> None:
    assert set(advantages_over_time([100.1] * 600)) == {0.0}


@pytest.mark.parametrize("rate", [0.001, 0.02, 0.3])
def test_rare_successes_count_about_as_much_as_in_groups_of_eight(rate: float) -> None:
    rng = random.Random(7)
    rewards = [float(rng.random() < rate) for _ in range(4000)]
    found = advantages_over_time(rewards)
    groups = torch.arange(4000) // 8
    grpo = advantages(row("grpo"), rewards_B=f64(*rewards), group_B=groups).tolist()
    assert max(map(abs, found)) < 7 / math.sqrt(8)
    ours, theirs = ([a for a, r in zip(x, rewards, strict=True) if r] for x in (found, grpo))
    assert 0.8 < statistics.fmean(ours) / statistics.fmean(theirs) < 1.25


NAN = math.nan


def by_component(
    name: str,
    a: Tensor,
    b: Tensor,
    *,
    group_B: Tensor = GROUP_B,
    shaping_B: Tensor | None = None,
    b_weight: float = 0.5,
) -> Tensor:
    weights_BK = torch.tensor([[1.0, b_weight]], dtype=torch.float64).expand(len(a), 2)
    shaping_B = torch.zeros_like(a) if shaping_B is None else shaping_B
    rewards_B = a.nan_to_num() + b_weight * b.nan_to_num() + shaping_B
    components = ComponentRewards(torch.stack([a, b], 1), weights_BK, shaping_B)
    return advantages(row(name, advantage="component_std"), rewards_B, group_B, components=components)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo"])
def test_gdpo_normalises_components_by_group_before_their_weighted_sum(name: str) -> None:
    # Group 0, a = (1, 0, 0): (2, -1, -1) / 3 over s = 0.577350 is (1.154701, -0.577350, -0.577350); b = (0, 3, 3) is
    # the opposite, times 0.5. Sum: (0.577350, -0.288675, -0.288675). Group 1, a equal: 0; b = (3, 1): (1, -1) over
    # s = 1.414214, times 0.5: (0.353553, -0.353553). Squares: 1/3 + 2/12 + 2/8 = 0.75; root of 0.75 / 5 = 0.387298.
    expected = f64(0.57735027, -0.28867513, -0.28867513, 0.35355339, -0.35355339) / 0.38729833
    actual = by_component(name, f64(1, 0, 0, 7, 7), f64(0, 3, 3, 3, 1))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_gdpo_sees_what_a_sum_of_equal_rewards_hides() -> None:
    # a + b / 2 is 1 for every sample of group 0, which has no signal for GRPO; its a and b differ.
    a, b = f64(1, 0, 0, 0, 0), f64(0, 2, 2, 0, 0)
    torch.testing.assert_close(advantages(row("grpo"), a + b / 2), f64(0, 0, 0, 0, 0))
    assert by_component("grpo", a, b).tolist()[0] > 1


def test_gdpo_compares_in_a_component_only_the_samples_that_have_it() -> None:
    # a: (1, -1) / 1.414214 for samples 0 and 1. b: (1, -1) / 1.414214 / 2 for samples 1 and 2. 3 and 4 have one b each.
    actual = by_component("grpo", f64(1, 0, NAN, NAN, NAN), f64(NAN, 1, 0, NAN, 5))
    sums = f64(1, -0.5, -0.5, 0, 0) / 2**0.5
    torch.testing.assert_close(actual, sums / (1.5 / 2 / 5) ** 0.5, rtol=0, atol=1e-5)


def test_gdpo_adds_the_punishment_for_length_without_dividing_it() -> None:
    actual = by_component("dapo", f64(1, 0, 1, 1, 1), f64(0, 0, 0, 0, 0), shaping_B=f64(0, 0, 0, -0.01, 0))
    assert abs(actual[3]) < 0.01 and actual[3] < 0 < actual[4]


@pytest.mark.parametrize("value", [0.1, 1e14, -3.3])
def test_gdpo_of_equal_components_is_exactly_zero(value: float) -> None:
    actual = by_component("grpo", f64(value, value, value, 1, 0), f64(value, value, value, 0, 0), b_weight=1 / 3)
    assert actual[:3].tolist() == [0, 0, 0]


@pytest.mark.parametrize("advantage", [name for name, facts in ADVANTAGES.items() if facts.compares == "siblings"])
def test_a_lone_survivor_has_advantage_0(advantage: str) -> None:
    rewards_B = f64(1, 0, 0, 7, 7)
    group_B = torch.tensor([0, 0, 0, 1, 2])
    components = ComponentRewards(rewards_B[:, None], torch.ones_like(rewards_B)[:, None], torch.zeros_like(rewards_B))
    tokens = [0, 0, 1, 2, 3, 4]  # the mean over them is not 0
    actual = advantages(row("grpo", advantage=advantage), rewards_B, group_B, sample_T=tokens, components=components)
    assert actual[4:].tolist() == [0, 0] and actual[0] > 0 > actual[2]


def by_turn(*rewards: tuple[float, ...], group_B: Tensor | None = None, shaping_B: Tensor | None = None) -> list[float]:
    """Return the advantages of the turns of episodes, which have two tokens each."""
    most = max(len(each) for each in rewards)
    table_BK = torch.stack([f64(*each, *[NAN] * (most - len(each))) for each in rewards])
    zeros_B = torch.zeros(len(rewards), dtype=torch.float64)
    turn_T = torch.tensor([k for each in rewards for k in range(len(each)) for _ in range(2)])
    found = advantages(
        row("turn-grpo"),
        f64(*map(sum, rewards)),
        zeros_B.long() if group_B is None else group_B,
        sample_T=[b for b, each in enumerate(rewards) for _ in range(2 * len(each))],
        turns=TurnRewards(table_BK, zeros_B if shaping_B is None else shaping_B, turn_T),
    )
    assert torch.equal(found[::2], found[1::2]), "all tokens of a turn have one advantage"
    return found[::2].tolist()


def test_a_turn_is_credited_with_what_follows_it() -> None:
    # Rewards to go: (3, 2), (1, 1) and (2): the third has ended, so 0 at the second turn. Means 2 and 1.
    # Centred: (1, 1), (-1, 0), (0, -). Squares: 1 + 1 + 1 + 0 + 0, and (0 - 1)^2 of the one that has ended: 4 in all,
    # over (3 - 1) x 2 places: deviation 1.
    assert by_turn((1, 2), (0, 1), (2,)) == pytest.approx([1, 1, -1, 0, 0], abs=1e-5)
    # A punishment of 1 for the length of the first: rewards to go (2, 1), (1, 1), (2), means 5/3 and 2/3.
    # Squares: (1 + 4 + 1) / 9 + (1 + 1 + 4) / 9 = 4 / 3 over 4 places.
    punished = by_turn((1, 2), (0, 1), (2,), shaping_B=f64(-1, 0, 0))
    assert punished == pytest.approx([3**0.5 * x / 3 for x in (1, 1, -2, 1, 1)], abs=1e-5)
    # Of the third: rewards to go (3, 2), (1, 1), (1) and still 0 after its end. Means 5/3 and 1.
    # Squares: (16 + 4 + 4) / 9 + 1 + 0 + 1 = 42 / 9 over 4 places.
    ended = by_turn((1, 2), (0, 1), (2,), shaping_B=f64(0, 0, -1))
    assert ended == pytest.approx([x / (7 / 6) ** 0.5 for x in (4 / 3, 1, -2 / 3, 0, -2 / 3)], abs=1e-5)


def test_credit_of_single_turns_is_that_of_whole_responses() -> None:
    rewards = [(1.0,), (0.0,), (0.25,), (4.0,), (2.0,)]
    whole = advantages(row("grpo"), f64(*(reward for (reward,) in rewards))).tolist()
    assert by_turn(*rewards, group_B=GROUP_B) == pytest.approx(whole, abs=1e-12)


def test_turns_of_equal_episodes_have_no_credit_and_a_lone_one_neither() -> None:
    assert by_turn((0.1, 0.2), (0.1, 0.2, 0.0), (0.1, 0.2)) == [0.0] * 7
    assert by_turn((1, 2), group_B=torch.tensor([0])) == [0.0, 0.0]
