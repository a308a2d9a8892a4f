"""The baseline of single samples: fixed before they begin, and hence without bias whatever finishes when."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch

from rollover.algorithms import AlgorithmConfig, resolve
from rollover.algorithms.advantages import compute_advantages, shaping
from rollover.batch import Baseline
from rollover.rollout import reward_history
from rollover.rollout.reward_history import RewardHistory
from rollover.rollout.scheduler import GroupRules
from rollover.types import Prompt
from tests.rollout.kit import play
from tests.rollout.test_ledger import opened
from tests.rollout.test_scheduler import Shell


def prompt(row: int, epoch: int = 0, source: str = "sums") -> Prompt:
    return Prompt(prompt_id=f"{source}/{row}@{epoch}", token_ids=(1,), text="", source=source)


@pytest.mark.parametrize("reward", [100.1, -9e14, 1e-30, 0.1])
def test_equal_rewards_have_that_mean_and_no_deviation(reward: float) -> None:
    history = RewardHistory()
    for i in range(2000):
        history.add(prompt(i % 50, epoch=i // 50), reward)
    assert history.baseline(prompt(7, epoch=99)) == Baseline(reward, 0.0, 7.0)


def test_the_moments_are_those_of_weights_that_fade_from_reward_to_reward() -> None:
    """Rewards far from 0 with a small spread: sums of squares would lose every digit of the deviation."""
    rewards = [1e6 + 0.01 * (i * i % 17) for i in range(500)]
    history = RewardHistory()
    for i, reward in enumerate(rewards):
        history.add(prompt(i), reward)
    weights = [math.exp(-(499 - i) / 256) for i in range(500)]
    total = math.fsum(weights)
    mean = math.fsum(w * (r - 1e6) for w, r in zip(weights, rewards, strict=True)) / total
    squares = math.fsum(w * (r - 1e6 - mean) ** 2 for w, r in zip(weights, rewards, strict=True))
    found = history.baseline(prompt(-1))
    assert found.mean - 1e6 == pytest.approx(mean, abs=1e-8)
    assert found.std == pytest.approx(math.sqrt(squares / total), rel=1e-6)


def test_a_history_stands_for_as_many_siblings_as_rewards_up_to_seven() -> None:
    history, found = RewardHistory(), []
    for i in range(9):
        history.add(prompt(i), float(i % 2))
        found.append(history.baseline(prompt(-1)).num_siblings)
    assert found[0] == 1.0
    assert found[:6] == pytest.approx([1, 2, 3, 4, 5, 6], rel=0.02)
    assert found[7:] == [7.0, 7.0]


def test_rewards_that_no_trainer_can_hold_leave_no_trace() -> None:
    history = RewardHistory()
    for reward in (1.0, math.nan, math.inf, 1e308, 0.0):
        history.add(prompt(0), reward)
    plain = RewardHistory()
    for reward in (1.0, 0.0):
        plain.add(prompt(0), reward)
    assert history.baseline(prompt(0)) == plain.baseline(prompt(0))


def test_a_row_that_was_seen_before_counts_for_more_than_its_source() -> None:
    history = RewardHistory()
    for i in range(100):
        history.add(prompt(i), 0.0)
    for _ in range(4):
        history.add(prompt(7, epoch=1), 1.0)
    fresh, seen = history.baseline(prompt(1000)), history.baseline(prompt(7, epoch=2))
    assert 0 < fresh.mean < 0.1
    assert seen.mean == pytest.approx(0.46, abs=0.03)  # 4 of 5 rewards are 1, and weigh as much as the source's mean
    assert history.baseline(prompt(7, source="other")) == Baseline(0.0, 0.0, 0.0)


@pytest.mark.parametrize("size", range(2, 9))
def test_siblings_that_had_finished_before_a_sample_opened_do_not_bias(size: int) -> None:
    """All outcomes of the samples of a prompt, enumerated: a response is short and wrong, or long and right, with
    probability p. Two run at a time, in a fixed order; whichever ends first makes room for the next, whose baseline
    then knows it. The gradient of the mean reward by the logit of p is p (1 - p)."""
    p, gradient, known = 0.3, 0.0, set[float]()
    for rewards in itertools.product((0, 1), repeat=size):
        history = RewardHistory()
        now, running = 0, list[tuple[int, int]]()
        for index, reward in enumerate(rewards):
            if len(running) == 2:
                now, ended = running.pop(running.index(min(running)))
                history.add(prompt(0), float(rewards[ended]))
            running.append((now + 1 + 3 * reward, index))
            baseline = history.baseline(prompt(0)).mean
            known.add(baseline)
            probability = math.prod(p if x else 1 - p for x in rewards)
            gradient += probability * (reward - baseline) * (reward - p) / size
    assert abs(gradient - p * (1 - p)) < 1e-12
    assert len(known) > 1 or size == 2


@pytest.mark.parametrize(("p", "expected"), [(0.05, 0.28), (0.3, 0.28), (0.7, 0.22), (0.95, 0.15)])
def test_siblings_that_have_finished_by_now_bias_the_gradient(p: float, expected: float) -> None:
    """Four outcomes: right with probability p or wrong, and long with a probability of 0.2 if right and 0.8 if wrong.
    The mean of those of three siblings that end no later, or p if none does, depends on a sample's own length. Bias
    over gradient, both with respect to the four logits."""
    outcomes = list(itertools.product((0, 1), (False, True)))
    chances = [(p if right else 1 - p) * (0.8 if right != long else 0.2) for right, long in outcomes]
    bias = [0.0] * 4
    for own, *siblings in itertools.product(range(4), repeat=4):
        by_now = [outcomes[i][0] for i in siblings if outcomes[i][1] <= outcomes[own][1]]
        baseline = sum(by_now) / len(by_now) if by_now else p
        probability = math.prod(chances[i] for i in (own, *siblings))
        for i in range(4):
            bias[i] -= probability * baseline * ((i == own) - chances[i])
    gradient = [chances[i] * (outcomes[i][0] - p) for i in range(4)]
    assert math.hypot(*bias) / math.hypot(*gradient) == pytest.approx(expected, abs=0.005)


def test_a_sample_carries_the_baseline_of_the_moment_it_was_opened() -> None:
    rig, batches = play(6, "april", unit="sample", group_size=4, rollout_batch_size=2, shaping=lambda n: -0.01 * n)
    groups = [g for b in batches.values() for g in b.groups]
    assert {len(g.trajectories) for g in groups} == {1}
    assert all(len(b.groups) == 8 for b in batches.values())
    # Replay the events: what had been scored when each group was opened.
    history, expected = RewardHistory(), {}
    prompts: dict[int, Prompt] = {}
    for event in rig.events:
        if hasattr(event, "prompt"):
            expected[event.group_id] = history.baseline(event.prompt)
            prompts[event.group_id] = event.prompt
        elif hasattr(event, "reward"):
            history.add(prompts[event.sample_id.group], event.reward + event.shaping)
    assert {g.group_id: g.baseline for g in groups} == {g.group_id: expected[g.group_id] for g in groups}
    assert len({g.baseline for g in groups}) > 4


def test_the_history_compares_what_the_trainer_compares() -> None:
    """The budget is 100 tokens and the last 20 of it are punished: a response of 90 that is always right has reward 1
    and counts 0.5, so among its like it is worth nothing and a shorter one, of 80, as much as one of 100 costs."""
    algorithm = resolve(AlgorithmConfig(name="dapo", advantage="history"))
    rules = GroupRules(shaping=partial(algorithm.overlong_punishment, 100))
    shell = Shell("april", max_running=1, rules=rules, unit="sample", group_size=4, rollout_batch_size=8)
    for _ in range(12):
        [group] = shell.started()
        shell.ends(group, num_tokens=90)
    next_group = shell.state.ledger.next_group_id
    shell.scheduler.record(opened(next_group))
    baseline = shell.state.statistics.baselines[next_group]
    assert baseline == Baseline(0.5, 0.0, 7.0)

    lengths_B = torch.tensor([80, 90, 100])
    advantages = compute_advantages(
        algorithm,
        rewards_B=torch.ones(3) + shaping(algorithm, lengths_B, max_response_tokens=100),
        group_B=torch.arange(3),
        sample_T=torch.arange(3),
        loss_mask_T=torch.ones(3),
        baseline_B3=torch.tensor([baseline] * 3),
    )
    # x = 0.5, 0, -0.5: 7/8 x / sqrt(x^2 / 8) = 7 / sqrt(8) times the sign of x
    assert advantages.tolist() == pytest.approx([7 / math.sqrt(8), 0, -7 / math.sqrt(8)], abs=1e-4)


def test_a_bounded_number_of_rows_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_history, "_MOST_ROWS", 2)
    history = RewardHistory()
    for row in ("a", "b", "a", "c"):
        history.add(Prompt(prompt_id=f"{row}@0", token_ids=(1,), text="", source="s"), 1.0)
    assert [*history.rows] == ["a", "c"]
