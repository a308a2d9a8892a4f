"""Which tokens of a batch had a gradient: the trainer's account against autograd's and a plain one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import rollover.trainer.local as trainer_module
from rollover.algorithms import Algorithm, AlgorithmConfig, resolve
from rollover.algorithms.advantages import ComponentRewards, compute_advantages
from rollover.algorithms.config import algorithm as public_algorithm
from rollover.batch import Batch, WasteCause
from rollover.errors import DataError, NoReward, RewardError
from rollover.rollout.events import BatchConsumed, BatchTrained, GroupOpened, SampleScored, SampleStarted, SegmentEnded
from rollover.rollout.ledger import Ledger
from rollover.trainer.minibatch import BatchTensors
from rollover.trainer.packing import TrainingSample
from rollover.types import FinishReason, Trajectory
from tests.rollout.kit import ParityScorer, make_rig, play, with_stop
from tests.segments import segment
from tests.trainer.builders import (
    assert_same,
    changed,
    clones,
    group_of,
    in_segment,
    make_batch,
    make_model,
    make_trainer,
    separate_logprobs,
    trained,
)
from tests.trainer.test_truncated_sampling import recorded
from tests.virtual_time import run

STEP = 3
TEMPERATURE = 0.8


def of_all_kinds(num_groups: int = 6) -> Batch:
    """Responses of several versions, some cut by their budget; the first two groups have equal rewards, and in the
    third one sample has exactly the mean."""
    rng = random.Random(5)
    batch = make_batch(step=STEP, num_groups=num_groups, group_size=4)
    with torch.no_grad():
        samples = [TrainingSample(prompt_ids=t.prompt.token_ids, response_ids=t.token_ids) for t in batch.trajectories]
        exact = separate_logprobs(make_model(), samples, TEMPERATURE).split([t.num_tokens for t in batch.trajectories])
    logprobs = iter(exact)

    def recorded(t: Trajectory, reward: float) -> Trajectory:
        cut, version = rng.randint(0, t.num_tokens), rng.choice((STEP - 1, STEP))
        near = [float(p) + rng.gauss(0, 0.6) for p in next(logprobs)]
        end = rng.choice((FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH))
        old = segment(t.token_ids[:cut], None, version=version)._replace(rollout_logprobs=tuple(near[:cut]))
        new = segment(t.token_ids[cut:], end, version=STEP)._replace(rollout_logprobs=tuple(near[cut:]))
        return replace(t, segments=(old, new), reward=reward)

    groups = []
    for i, group in enumerate(batch.groups):
        rewards = [0.7] * 4 if i < 2 else [0.0, 0.5, 1.0, 0.5] if i == 2 else [rng.random() for _ in range(4)]
        groups.append(group_of([*map(recorded, group.trajectories, rewards)], i))
    return Batch(step=STEP, groups=tuple(groups))


def folded(batch: Batch, untrained: Any) -> Ledger:
    """A ledger that saw the batch decoded, consumed and trained."""
    ledger = Ledger()
    ledger.next_step = batch.step
    for group in batch.groups:
        size = len(group.trajectories)
        ledger.apply(GroupOpened(0.0, group.group_id, group.prompt, size, group.group_id + 1))
        for t in group.trajectories:
            assert t.reward is not None
            ledger.apply(SampleStarted(0.0, t.sample_id, 0))
            for part in t.segments:
                ledger.apply(SegmentEnded(0.0, t.sample_id, part))
            ledger.apply(SampleScored(0.0, t.sample_id, t.reward))
    ledger.apply(BatchConsumed(0.0, batch.step, tuple(g.group_id for g in batch.groups)))
    ledger.apply(BatchTrained(0.0, batch.step, untrained))
    ledger.check()
    return ledger


ALGORITHMS = {
    "plain": {},
    "mask_stale": {"correction": "mask_stale"},
    "mis": {"correction": "mis", "correction_bounds": (0.7, 1.4)},
    "mis by sample": {"correction": "mis", "correction_level": "geometric", "correction_bounds": (0.9, 1.1)},
    "guard": {"guard": (0.9, 1.1)},
    "guard and mis": {"guard": (0.9, 1.1), "correction": "mis", "correction_bounds": (0.7, 1.4)},
    "mask_truncated": {"mask_truncated": True},
    "all at once": {
        "mask_truncated": True,
        "guard": (0.85, 1.15),
        "correction": "mis",
        "correction_bounds": (0.7, 1.4),
    },
    "one ratio for a sample": {"name": "gspo", "correction": "mask_stale", "mask_truncated": True},
    "no ratio": {"name": "rloo", "correction": "mask_stale"},
    "capped": {"name": "cispo", "correction": "mis", "correction_bounds": (0.7, 1.4)},
    "whitened": {"name": "reinforce++", "mask_truncated": True, "correction": "mask_stale", "kl_coef": 0.0},
}


def algorithm_of(name: str) -> Algorithm:
    return resolve(AlgorithmConfig(**ALGORITHMS[name]))  # type: ignore[arg-type]


def train(
    folder: Path, algorithm: Algorithm, batch: Batch, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[dict[WasteCause, int], int, dict[str, float]]:
    """What the trainer says, the number of tokens at whose log-prob autograd finds the loss exactly flat, and the
    metrics."""
    flat = 0

    def spy(*args: Any) -> Any:
        nonlocal flat
        loss, metrics = original(*args)
        [slope_T] = torch.autograd.grad(loss, args[1].trainer_logprobs_T, retain_graph=True, materialize_grads=True)
        flat += int((slope_T == 0).sum())
        return loss, metrics

    original = trainer_module.policy_loss
    monkeypatch.setattr(trainer_module, "policy_loss", spy)
    trainer = make_trainer(folder, algorithm=algorithm, temperature=TEMPERATURE, micro_batch_tokens=90, **settings)
    trainer._version = batch.step
    done = trainer.step(batch)
    return dict(done.untrained), flat, dict(done.metrics)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_ledger_wastes_tokens_whose_gradient_is_0(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = of_all_kinds()
    untrained, flat, metrics = train(folder, algorithm_of(name), batch, monkeypatch)
    ledger = folded(batch, untrained)
    assert 0 < ledger.tokens.wasted.total() == flat < batch.num_tokens
    assert ledger.tokens.trained == batch.num_tokens - flat == metrics["tokens/trained"]
    assert ledger.tokens.live == 0


def test_each_cause_is_counted_as_the_batch_has_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = of_all_kinds()
    plain: Counter[WasteCause] = Counter()
    for group in batch.groups:
        mean = sum(group.rewards_G) / len(group.rewards_G)
        for t in group.trajectories:
            for version in t.policy_versions:
                if t.finish_reason is FinishReason.LENGTH:
                    plain[WasteCause.MASKED_TRUNCATED] += 1
                elif version < STEP:
                    plain[WasteCause.MASKED_STALE] += 1
                elif t.reward == pytest.approx(mean, abs=1e-12):
                    plain[WasteCause.ZERO_ADVANTAGE] += 1
    algorithm = resolve(AlgorithmConfig(mask_truncated=True, correction="mask_stale"))
    assert train(folder, algorithm, batch, monkeypatch)[0] == plain


@pytest.mark.parametrize("name", ["grpo", "dr-grpo", "rloo"])
@pytest.mark.parametrize(
    "rewards",
    [
        (16777216.0, 16777217.0),
        (0.1 + 0.2, 0.3),
        (0.3, 0.3, 0.3),
        (0.5,),
        (0.1,) * 7,
        (1e15, 1e15 - 1, 1e15),
        (1e-300, 2e-300),
        (2e-20, 1e-20),
    ],
)
def test_a_group_passes_the_filter_if_and_only_if_it_has_a_signal(name: str, rewards: tuple[float, ...]) -> None:
    batch = make_batch(num_groups=1, group_size=len(rewards))
    rewarded = [replace(t, reward=reward) for t, reward in zip(batch.trajectories, rewards, strict=True)]
    algorithm = resolve(AlgorithmConfig(name=name, group_filter="zero_signal"))
    data = BatchTensors.of([group_of(rewarded)], algorithm, step=0, device=torch.device("cpu"))
    advantages_T = compute_advantages(
        algorithm, rewards_B=data.rewards_B, group_B=data.group_B, sample_T=data.sample_T, loss_mask_T=data.loss_mask_T
    ).float()
    assert algorithm.keeps_group(rewards) == (max(rewards) - min(rewards) > 1e-30) == bool(advantages_T.any())
    if rewards[0] == 16777216:
        scale = {"grpo": 0.5**0.5, "dr-grpo": 0.5, "rloo": 1.0}[name]
        torch.testing.assert_close(advantages_T, torch.tensor([-scale, scale])[data.sample_T], rtol=3e-6, atol=0)


@pytest.mark.parametrize(
    ("parts", "has_signal"),
    [
        ([{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.0}], True),
        ([{"a": 0.1 + 0.2}, {"a": 0.3}], True),
        ([{"a": 0.1, "b/x": 1e14}, {"a": 0.1, "b/x": 1e14}, {"b/x": 1e14, "a": 0.1}], False),
        ([{"a": 1.0}, {"b/x": 1.0}], False),
        ([{"a": 1.0}, {"a": 1.0, "b/y": 1.0}, {"b/y": 0.5}], True),
        ([{"c": 1.0, "a": 0.5}, {"c": 0.0, "a": 0.5}], False),
    ],
)
def test_filter_and_advantage_see_the_same_components(parts: list[dict[str, float]], has_signal: bool) -> None:
    """In a batch whose other group has other components, from another source."""
    weights = {"a": 1.0, "b": 0.3, "c": 0.0}
    row: dict[str, Any] = {"name": "dapo", "advantage": "component_std"}
    algorithm = public_algorithm(**row, reward_weights={"s": weights, "t": {"z": 2.0}})
    groups = []
    rewarded = {"s": parts, "t": [{"z": float(i)} for i in range(len(parts))]}
    for group, (source, components) in zip(
        make_batch(num_groups=2, group_size=len(parts)).groups, rewarded.items(), strict=True
    ):
        asked = replace(group.prompt, source=source)
        scored = zip(group.trajectories, components, strict=True)
        members = [replace(t, prompt=asked, reward=0.0, components=one) for t, one in scored]
        groups.append(group_of(members, group.group_id))
    data = BatchTensors.of(groups, algorithm, step=0, device=torch.device("cpu"))
    assert data.components_2BK is not None
    values_BK, weights_BK = data.components_2BK
    advantages_T = compute_advantages(
        algorithm,
        rewards_B=data.rewards_B,
        group_B=data.group_B,
        sample_T=data.sample_T,
        loss_mask_T=data.loss_mask_T,
        components=ComponentRewards(values_BK, weights_BK, torch.zeros_like(data.rewards_B)),
    )
    for missing in ({}, {"s": weights}, {"s": weights, "t": {"y": 1.0}}):
        bare = public_algorithm(**row, reward_weights=missing)
        with pytest.raises(DataError, match=r"no weight for reward '[abcz]' of source '[st]'.*reward_weights"):
            BatchTensors.of(groups, bare, step=0, device=torch.device("cpu"))
    assert algorithm.keeps_group([algorithm.compared("s", 0.0, one) for one in parts]) == has_signal
    assert bool(advantages_T[data.sample_T < len(parts)].any()) == has_signal
    assert advantages_T[data.sample_T >= len(parts)].any()


def test_a_kl_term_trains_what_the_rewards_leave_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = resolve(AlgorithmConfig(kl_coef=0.1, correction="mask_stale"))
    untrained = train(folder, algorithm, of_all_kinds(), monkeypatch)[0]
    assert untrained.keys() == {WasteCause.MASKED_STALE}


def test_tokens_that_the_clip_holds_are_trained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second mini-batch the weights have moved, and a narrow clip leaves most tokens without a slope."""
    algorithm = resolve(AlgorithmConfig(clip_low=1e-6, clip_high=1e-6))
    batch = of_all_kinds()
    settings = {"mini_batches": 2, "learning_rate": 0.02}
    untrained, flat, _ = train(folder, algorithm, batch, monkeypatch, **settings)
    assert untrained.keys() == {WasteCause.ZERO_ADVANTAGE}
    assert flat > sum(untrained.values()) + 20


# -- batches that say nothing ---------------------------------------------------------------------------------------


def silent(batch: Batch, why: str) -> Batch:
    """All samples cut by their budget, all stale, or all of the same reward."""

    changes: dict[str, Callable[[Trajectory], Trajectory]] = {
        "masked": partial(in_segment, finish_reason=FinishReason.LENGTH),
        "stale": partial(in_segment, policy_version=batch.step - 1),
        "equal": partial(replace, reward=0.25),
    }
    return changed(batch, changes[why])


SILENT = {
    "masked": (WasteCause.MASKED_TRUNCATED, {"mask_truncated": True}),
    "stale": (WasteCause.MASKED_STALE, {"correction": "mask_stale"}),
    "equal": (WasteCause.ZERO_ADVANTAGE, {}),
}


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "rloo", "reinforce++", "reinforce++-baseline", "cispo"])
@pytest.mark.parametrize("why", SILENT)
def test_a_batch_without_a_gradient_is_a_step_without_an_update(folder: Path, why: str, name: str) -> None:
    cause, columns = SILENT[why]
    kl = {"kl_coef": 0.0} if name.startswith("reinforce") else {}  # a KL term is a gradient
    overlong = {"overlong_buffer": 0.0} if name == "dapo" else {}  # and so is a punishment
    algorithm = resolve(AlgorithmConfig(name=name, **columns, **kl, **overlong))  # type: ignore[arg-type]
    trainer = trained(folder, algorithm=algorithm, weight_decay=0.1)  # momentum that would move the weights
    before = clones(trainer.weights())
    moments = [{k: v.clone() for k, v in s.items()} for s in trainer._optimizer.state.values()]
    batch = silent(make_batch(step=1), why)
    done = trainer.step(batch)
    assert trainer.version == 2 and done.untrained == {cause: batch.num_tokens}
    assert_same(trainer.weights(), before)
    after = list(trainer._optimizer.state.values())
    assert all(torch.equal(a[k], b[k]) for a, b in zip(after, moments, strict=True) for k in b)
    assert all(torch.isfinite(torch.tensor(v)) for v in done.metrics.values())
    assert done.metrics["grad_norm"] == 0 == done.metrics["tokens/trained"]


def test_a_silent_mini_batch_leaves_the_others_as_they_are(folder: Path) -> None:
    """Two mini-batches, one of them without a gradient: the weights are as after the other alone."""
    batch = make_batch(step=0, num_groups=2)
    quiet = silent(batch, "equal").groups[0]
    trainer = make_trainer(folder, mini_batches=2)
    trainer.step(Batch(step=0, groups=(quiet, batch.groups[1])))
    alone = make_trainer(folder)
    alone.step(Batch(step=0, groups=(batch.groups[1],)))
    assert_same(trainer.weights(), alone.weights())


def test_a_skipped_batch_makes_a_version_with_the_former_state(folder: Path, tmp_path: Path) -> None:
    def state(trainer: Any, name: str) -> tuple[bytes, ...]:
        trainer.save(tmp_path / name)
        return tuple((tmp_path / name / f).read_bytes() for f in ("model.safetensors", "trainer/optimizer.safetensors"))

    trainer = trained(folder)
    before = state(trainer, "before")
    batch = make_batch(step=1)
    assert trainer.skip(batch).untrained == {WasteCause.SKIPPED: batch.num_tokens}
    assert trainer.version == 2 and state(trainer, "after") == before
    trainer.step(make_batch(step=2))
    resumed = make_trainer(folder, resume_from=tmp_path / "after")
    resumed.step(make_batch(step=2))
    assert state(resumed, "resumed") == state(trainer, "whole")


def test_what_a_step_that_raised_left_cannot_be_saved(folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(folder, learning_rate=1e38)
    with pytest.raises(Exception, match=r"a step with learning rate 1e\+38 made weights that are not finite; start a"):
        for step in range(3):
            trainer.step(make_batch(step=step))
    with pytest.raises(AssertionError, match="no version's"):
        trainer.save(tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


# -- the causes -----------------------------------------------------------------------------------------------------


class LastFails(ParityScorer):
    def __init__(self, how: type[RewardError] = RewardError) -> None:
        super().__init__()
        self.how = how

    async def score(self, trajectory: Trajectory) -> float:
        if trajectory.sample_id.index == 2:
            raise self.how("it broke")
        return await super().score(trajectory)


def of_an_untrusted_engine() -> set[WasteCause]:
    async def work() -> set[WasteCause]:
        rig = make_rig("bounded_async")
        await rig.train(2, train_s=2.0)
        await rig.driver.drop_tokens_of("", lambda: None)
        await with_stop(rig, asyncio.sleep(0))
        return set((+rig.ledger.tokens.wasted).keys())

    return run(work())


def test_every_cause_of_waste_is_one_that_something_gives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts: tuple[tuple[str, dict[str, Any]], ...] = (
        ("april", {"drop_surplus": True, "length": lambda request: 5}),
        ("oversample", {}),
        ("sync", {"keep_group": lambda rewards: len(set(rewards)) > 1}),
        ("sync", {"group_size": 3, "scorer": LastFails()}),
        ("sync", {"group_size": 3, "scorer": LastFails(NoReward)}),
    )
    given: set[WasteCause] = set()
    for name, settings in rollouts:
        given |= (+play(6, name, **settings)[0].ledger.tokens.wasted).keys()
    given |= of_an_untrusted_engine()
    for algorithm in ("all at once", "mask_stale"):
        given |= train(folder, algorithm_of(algorithm), of_all_kinds(), monkeypatch)[0].keys()
    given |= make_trainer(folder).skip(make_batch()).untrained.keys()
    given |= make_trainer(folder).step(recorded(make_batch(), only_choice_of=1)).untrained.keys()
    assert given == set(WasteCause)
