"""Rewards with components, rewards that do not apply, and rewards that compare siblings, from scorer to batch."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollover.batch import WasteCause
from rollover.errors import DataError, NoReward, RewardError, RunError
from rollover.rollout.config import Limits
from rollover.rollout.events import SampleScored
from rollover.rollout.journal import Journal
from rollover.rollout.metrics import batch_metrics
from rollover.types import SampleId, Score, Trajectory
from tests.rollout.kit import ParityScorer, content, make_rig, play, with_stop
from tests.rollout.test_driver import DOES_NOT_APPLY, FIRST, SelectiveScorer, first_is


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        (lambda i: False, "the samples of each have the same reward"),
        (lambda i: i.index == 0, "7 of them have too few rewards to compare .the last failure: f returned None"),
        (lambda i: i == (i.group // 2 * 2, 0), "[34] of them have too few rewards .*, and the samples of each other"),
    ],
    ids=["equal rewards", "lone rewards", "both"],
)
async def test_groups_without_a_signal_end_the_run(fails: Callable[[SampleId], bool], why: str) -> None:
    limits = Limits(max_dropped_batches=3)
    scorer = SelectiveScorer(fails, DOES_NOT_APPLY)
    rig = make_rig("april", scorer=scorer, keep_group=lambda rewards: False, limits=limits)
    with pytest.raises(RunError, match=rf"the last 7 groups gave no signal: {why}"):
        await with_stop(rig, rig.train(20))
    assert rig.ledger.dropped.total() == 7, "three batches of two, and one more"


class PartsScorer(ParityScorer):
    async def score(self, trajectory: Trajectory) -> float:
        parity = await super().score(trajectory)
        parts = {"parity": parity} | ({"short": 1.0} if trajectory.num_tokens < 8 else {})
        return Score(parity + sum(parts.values()), components=parts, solved=parity == 1)


@pytest.mark.parametrize("reward", [np.float32(0.5), np.int64(2), np.bool_(True), np.array(0.25), 1])
def test_a_reward_of_any_library_is_recorded_as_a_float(reward: Any, tmp_path: Path) -> None:
    scorer = SelectiveScorer(lambda sample_id: True, reward)
    rig, _ = play(1, "sync", scorer=scorer, journal=Journal(tmp_path / "journal.sqlite"))
    found = {(type(e.reward), e.reward) for e in rig.events if isinstance(e, SampleScored)}
    assert found == {(float, float(reward))}


@pytest.mark.parametrize("reward", [None, "good", [1.0, 2.0], np.zeros(2)])
def test_a_reward_that_is_no_number_is_named(reward: Any) -> None:
    with pytest.raises(DataError, match=r"the reward of g\d\.\d is .*: a scorer must return a number"):
        play(1, "sync", scorer=SelectiveScorer(lambda sample_id: True, reward))


def test_a_reward_without_components_is_journaled_without_them(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    play(1, "sync", scorer=first_is(DOES_NOT_APPLY), group_size=3, journal=journal)
    bodies = sqlite3.connect(journal.path).execute("SELECT body FROM events WHERE kind = 'SampleScored'")
    assert all(json.loads(body).keys() == {"time_s", "sample_id", "reward", "shaping"} for (body,) in bodies)


def test_metrics_have_a_mean_by_component_and_by_source() -> None:
    _, batches = play(1, "sync", scorer=PartsScorer())
    numbers = batch_metrics(batches[0])
    samples = batches[0].trajectories
    short = [t for t in samples if "short" in t.components]
    assert 0 < len(short) < len(samples), "a component that a response does not have does not count"
    assert numbers["reward/component/short"] == 1
    assert numbers["reward/component/parity"] == sum(t.components["parity"] for t in samples) / len(samples)
    assert numbers["reward/source/toy"] == numbers["reward/mean"]
    assert numbers["pass_rate/source/toy"] == numbers["reward/component/parity"]
    plain = batch_metrics(play(1, "sync")[1][0])
    assert not [name for name in plain if "component" in name or "source" in name]


class RankScorer(ParityScorer):
    """The place of a sample among its siblings by length; calls are recorded."""

    def __init__(self, delay_s: float = 0.0, bad: Sequence[SampleId] = ()) -> None:
        super().__init__(delay_s)
        self.calls: list[tuple[SampleId, ...]] = []
        self.bad = bad

    def compares_siblings(self, source: str) -> bool:
        return True

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[float | RewardError]:
        self.calls.append(tuple(t.sample_id for t in trajectories))
        await asyncio.sleep(self.delay_s)
        lengths = sorted(t.num_tokens for t in trajectories)
        return [
            NoReward("no place") if t.sample_id in self.bad else float(lengths.index(t.num_tokens))
            for t in trajectories
        ]


@pytest.mark.parametrize("name", ["sync", "april", "rollover", "token_budget"])
@pytest.mark.parametrize("lockstep", [False, True])
def test_siblings_are_scored_once_and_together_when_the_last_has_ended(name: str, lockstep: bool) -> None:
    rig, batches = play(4, name, scorer=RankScorer(2.0), group_size=3, max_running=5, lockstep=lockstep)
    scored = [e.sample_id for e in rig.events if isinstance(e, SampleScored)]
    assert len(set(scored)) == len(scored)
    for call in rig.scorer.calls:
        assert [i.index for i in call] == [0, 1, 2]
    for trajectory in (t for b in batches.values() for t in b.trajectories):
        siblings = next(g for b in batches.values() for g in b.groups if g.group_id == trajectory.sample_id.group)
        lengths = sorted(t.num_tokens for t in siblings.trajectories)
        assert trajectory.reward == lengths.index(trajectory.num_tokens)


def test_a_group_is_scored_without_the_siblings_that_failed() -> None:
    rig, batches = play(1, "sync", scorer=RankScorer(bad=[FIRST]), group_size=3)
    group = next(g for g in batches[0].groups if g.group_id == 0)
    assert [t.sample_id.index for t in group.trajectories] == [1, 2]
    assert rig.ledger.tokens.wasted[WasteCause.NO_REWARD] > 0


async def test_a_group_whose_run_ended_before_its_scores_is_scored_again() -> None:
    rig = make_rig("sync", scorer=RankScorer(1e6))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(500):
            await rig.driver.next_batch()
    await rig.driver.stop()
    assert rig.scorer.calls and not [e for e in rig.events if isinstance(e, SampleScored)]
    resumed = make_rig("sync", scorer=RankScorer(), state=rig.state)
    whole = make_rig("sync", scorer=RankScorer())
    found, expected = [await with_stop(each, each.train(2)) for each in (resumed, whole)]
    assert [content(batch) for batch in found.values()] == [content(batch) for batch in expected.values()]
