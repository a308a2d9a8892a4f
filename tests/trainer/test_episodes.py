"""Observed tokens are read and never trained: packed episodes against a plain forward of the whole sequence."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from rollover.algorithms import AlgorithmConfig, resolve
from rollover.algorithms.losses import policy_loss
from rollover.batch import Batch
from rollover.trainer import local
from rollover.trainer.logprobs import all_logprobs
from rollover.trainer.minibatch import BatchTensors, StepConstants, split
from rollover.trainer.models import open_model
from rollover.trainer.packing import TrainingSample, pack
from rollover.types import FinishReason, Observation, SampleId, Segment, Trajectory
from tests.trainer.builders import (
    VOCAB,
    assert_gradients,
    group_of,
    make_batch,
    make_folder,
    make_model,
    make_trainer,
    separate_logprobs,
    to_float64,
)


def episodes(num_groups: int = 4, *, branch: bool = False) -> list[Trajectory]:
    """Siblings with one to four turns, parked within turns, and with an answer after the last one now and then. If they
    branch, a turn goes on from any of those before it."""
    rng = random.Random(3)

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, VOCAB) for _ in range(rng.randint(1, most)))

    def segment(reason: FinishReason | None, version: int) -> Segment:
        tokens = ids(6)
        return Segment(version, tokens, (-1.0,) * len(tokens), reason, version, 0.0, 1.0)

    made = []
    for group in make_batch(step=3, num_groups=num_groups, group_size=3).groups:
        for index in range(3):
            turns = rng.randint(1, 6 if branch else 4)
            segments, answers = [], []
            for turn in range(turns):
                if rng.random() < 0.5:
                    segments.append(segment(FinishReason.ABORT, 2))
                segments.append(segment(FinishReason.TURN, 3))
                end = FinishReason.STOP if turn == turns - 1 else None
                answer = Observation(ids(5) if end is None or rng.random() < 0.5 else (), "said", None, end)
                answers.append(answer._replace(parent=rng.randint(0, turn) if branch and end is None else None))
            made.append(
                Trajectory(
                    sample_id=SampleId(group.group_id, index),
                    prompt=group.prompt,
                    segments=tuple(segments),
                    observations=tuple(answers),
                    reward=rng.random(),
                )
            )
    return made


@pytest.mark.parametrize("branch", [False, True])
def test_each_sampled_token_is_predicted_once_after_all_on_its_path(tmp_path: Path, branch: bool) -> None:
    model, policy = to_float64(make_model()), to_float64(open_model(make_folder(tmp_path)))
    found = episodes(branch=branch)
    assert (max(len(t.paths) for t in found) > 2) == branch
    alone = [
        TrainingSample(prompt_ids=t.before(turn), response_ids=ids) for t in found for turn, ids in enumerate(t.turns)
    ]
    expected = separate_logprobs(model, alone, 0.8)
    samples = [path for t in found for path in TrainingSample.all_of(t)]
    num_tokens = sum(t.num_tokens for t in found)
    assert sum(s.num_sampled for s in samples) == num_tokens == len(expected)
    assert any(s.places for s in samples) == branch, "a path goes on behind turns of others"
    for budget in (1, 40, 10**6):
        got = all_logprobs(policy, pack(samples, budget), 0.8, num_tokens=num_tokens)
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-10)

    weights = torch.randn(num_tokens, dtype=torch.float64)
    assert_gradients(policy, model, expected, samples, weights, 0.8, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("branch", [False, True])
def test_every_count_of_a_batch_is_of_sampled_tokens(branch: bool) -> None:
    found = episodes(branch=branch)
    groups = [group_of(found[3 * g : 3 * g + 3], g) for g in range(4)]
    data = BatchTensors.of(groups, resolve(AlgorithmConfig(name="grpo")), step=3, device=torch.device("cpu"))
    assert data.lengths_B.tolist() == [t.num_tokens for t in found]
    assert data.num_tokens == len(data.loss_mask_T) == sum(t.num_tokens for t in found)
    assert data.staleness_T.tolist() == [3 - v for t in found for v in t.policy_versions]
    minis = split(data, 2, budget=60, max_response_tokens=99)
    assert sum(mini.denominators.num_tokens for mini in minis) == data.num_tokens
    assert [mini.denominators.num_samples for mini in minis] == [6, 6]
    order = torch.cat([row.token_T for mini in minis for row in mini.rows])
    assert sorted(order.tolist()) == list(range(data.num_tokens))
    ids = torch.cat([row.target_T for mini in minis for row in mini.rows])
    assert ids[order.argsort()].tolist() == [i for t in found for i in t.token_ids]


@pytest.mark.parametrize(("name", "by_row"), [("grpo", False), ("gspo", True)])
def test_a_tree_weighs_as_one_sample(name: str, by_row: bool) -> None:
    """The mean over an episode is over its tokens or, for ratios of sequences, over its paths."""
    found = episodes(branch=True)
    algorithm = resolve(AlgorithmConfig(name=name, aggregation="seq-mean-token-mean", correction="none"))
    data = BatchTensors.of([group_of(found)], algorithm, step=3, device=torch.device("cpu"))
    torch.manual_seed(0)
    proximal_T = -torch.rand(data.num_tokens)
    now_T = (proximal_T + 0.02 * torch.randn(data.num_tokens)).requires_grad_()
    advantages_T = torch.randn(len(found))[data.sample_T]
    constants = StepConstants(proximal_logprobs_T=proximal_T, ref_logprobs_T=None, advantages_T=advantages_T)
    (mini,) = split(data, 1, budget=30, max_response_tokens=99)
    got = sum(
        policy_loss(
            algorithm, mini.token_batch(data, constants, row, now_T[row.token_T], as_proximal=False), mini.denominators
        )[0]
        for row in mini.rows
    )
    expected = torch.zeros(())
    for place, trajectory in enumerate(found):
        begin = int((data.sample_T < place).sum())
        first, losses, seen = [0, *accumulate(map(len, trajectory.turns))], [], set[int]()
        for path in trajectory.paths:
            new = (
                torch.tensor([i for turn in path if turn not in seen for i in range(first[turn], first[turn + 1])])
                + begin
            )
            seen.update(path)
            log_ratio_T = now_T[new] - proximal_T[new]
            ratio_T = (log_ratio_T.mean().expand_as(log_ratio_T) if by_row else log_ratio_T).exp()
            clipped_T = ratio_T.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
            losses.append(-torch.minimum(ratio_T * advantages_T[new], clipped_T * advantages_T[new]))
        mean = torch.stack([part.mean() for part in losses]).mean() if by_row else torch.cat(losses).mean()
        expected = expected + mean / len(found)
    torch.testing.assert_close(got, expected)
    (got - expected).backward()
    assert now_T.grad is not None and now_T.grad.abs().max() < 1e-7


def test_a_truncated_episode_is_masked_as_a_truncated_response_is() -> None:
    cut = [
        replace(t, observations=(*t.observations[:-1], Observation((), end=FinishReason.LENGTH))) for t in episodes(1)
    ]
    masking = resolve(AlgorithmConfig(name="grpo", mask_truncated=True))
    data = BatchTensors.of([group_of(cut)], masking, step=3, device=torch.device("cpu"))
    assert not data.loss_mask_T.any()


@pytest.mark.parametrize("branch", [False, True])
def test_the_longest_path_is_the_length_punished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, branch: bool) -> None:
    found, lengths = episodes(1, branch=branch), []
    for t in found:
        ends = [len(t.before(path[-1])) + len(t.turns[path[-1]]) for path in t.paths]
        lengths.append(max(t.num_tokens, max(ends) - len(t.prompt.token_ids)))
    trainer, spy = make_trainer(make_folder(tmp_path), algorithm="dapo"), Mock(wraps=local.shaping)
    trainer._version = 3
    monkeypatch.setattr(local, "shaping", spy)
    trainer.step(Batch(step=3, groups=(group_of(found),)))
    assert spy.call_args.args[1].tolist() == lengths


def test_what_is_observed_before_the_first_turn_is_the_prompt() -> None:
    begun, turn = Segment(0, (), (), FinishReason.TURN, 0, 0.0, 0.0), Segment(1, (8, 9), (-1.0,) * 2, None, 1, 0.0, 1.0)
    prompt = replace(make_batch(step=1).groups[0].prompt, token_ids=())
    trajectory = Trajectory(
        sample_id=SampleId(0, 0), prompt=prompt, segments=(begun, turn), observations=(Observation((5, 6, 7)),)
    )
    assert TrainingSample.all_of(trajectory) == (TrainingSample(prompt_ids=(5, 6, 7), response_ids=(8, 9)),)


def test_rewards_of_turns_stand_beside_their_tokens_and_have_the_same_sum() -> None:
    first, second, *rest = episodes(num_groups=1)
    begun = [Segment(0, (), (), FinishReason.TURN, 0, 0.0, 0.0), *first.segments]  # the environment writes the prompt
    answers = [Observation((5,), "prompt"), *(o._replace(reward=0.5) for o in first.observations)]
    first = replace(first, segments=tuple(begun), observations=tuple(answers), reward=4.0)
    siblings = (first, second, *rest)
    data = BatchTensors.of(
        [group_of(siblings)],
        replace(resolve(AlgorithmConfig(name="turn-grpo")), turn_weights={first.prompt.source: 0.1}),
        step=3,
        device=torch.device("cpu"),
    )
    assert data.turns_BK is not None and data.turn_T is not None
    torch.testing.assert_close(data.turns_BK.nansum(1), data.rewards_B)
    given = [0.1 * 0.5] * (first.num_turns - 1)
    given[-1] += 4.0 - sum(given)
    assert data.turns_BK[0, 1 : first.num_turns].tolist() == given
    for place, trajectory in enumerate(siblings):
        assert (~data.turns_BK[place].isnan()).sum() == trajectory.num_turns - trajectory.has_opening
        turns = data.turn_T[data.sample_T == place].tolist()
        assert turns == [turn for turn, ids in enumerate(trajectory.turns) for _ in ids]
