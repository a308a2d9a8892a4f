"""Lengths, lag and baselines: hand-worked numbers, and that a restart changes none of them."""

from __future__ import annotations

from typing import Any

import pytest

from rollover.batch import Baseline
from rollover.rollout.events import CheckpointSaved, Event, SampleScored
from rollover.rollout.state import RolloutState
from rollover.rollout.statistics import RecentLengths, RecentMean, Statistics
from rollover.types import SampleId
from tests.rollout.test_ledger import STOP, consumed, dropped, ended, failed, opened, published, restarted, started


def numbers_of(statistics: Statistics) -> dict[str, Any]:
    """All that the statistics know, comparable, but for the batch whose training is being timed."""
    return {name: repr(value) for name, value in vars(statistics).items() if name != "_taken"}


def decoded(group_id: int, *segments: tuple[int, int], index: int = 0, reward: float = 0.5) -> list[Event]:
    """Events of a sample from its start to its reward; ``segments``: (tokens, version) each."""
    sample_id = SampleId(group_id, index)
    events: list[Event] = [started(sample_id, segments[0][1])]
    for place, (num_tokens, version) in enumerate(segments, start=1):
        events.append(ended(sample_id, num_tokens, STOP if place == len(segments) else None, version=version))
    return [*events, SampleScored(time_s=0.0, sample_id=sample_id, reward=reward)]


def test_the_lag_is_that_of_batches_and_earlier_ones_count_less() -> None:
    state = RolloutState([opened(0), opened(1), *decoded(0, (60, 0)), consumed(0, 0), published(1)])
    assert state.statistics.lag == RecentMean(num_batches=1.0, total=0.0)
    for event in [*decoded(1, (40, 0), (60, 1)), consumed(1, 1)]:  # 40 tokens are one version old in step 1
        state.apply(event)
    kept = 63 / 64
    assert state.statistics.lag == RecentMean(num_batches=1 + kept, total=0.4)
    assert state.statistics.lag.mean == pytest.approx(0.4 / 1.984375)


def test_a_training_step_is_timed_unless_its_batch_was_handed_out_again() -> None:
    state = RolloutState([opened(0), opened(1), *decoded(0, (3, 0)), *decoded(1, (5, 0))])
    trained = (consumed(0, 0)._replace(time_s=2.0), published(1)._replace(time_s=9.0))
    resumed = (restarted(1), published(1)._replace(time_s=50.0))
    for event in (*trained, *resumed):
        state.apply(event)
    assert state.statistics.training_s == RecentMean(num_batches=1.0, total=7.0)
    for event in (consumed(1, 1), restarted(1), consumed(1, 1), published(2)._replace(time_s=99.0)):
        state.apply(event)
    assert state.statistics.training_s == RecentMean(num_batches=1.0, total=7.0)


def test_the_start_of_a_process_is_no_iteration() -> None:
    one = SampleId(0, 0)
    tokens = ended(one, 100, None)._replace(time_s=2.0)
    resumed = (restarted(0)._replace(time_s=2.0), published(1)._replace(time_s=120.0))
    state = RolloutState([opened(0), started(one, 0), tokens, *resumed])
    assert state.statistics.pace.c0_s == pytest.approx(0.02)


def test_lengths_are_those_of_the_scored_samples_of_trained_groups() -> None:
    state = RolloutState([opened(0, size=3), opened(1), *decoded(0, (7, 0)), *decoded(0, (9, 0), index=2)])
    for event in [failed(SampleId(0, 1)), *decoded(1, (4, 0)), consumed(0, 0)]:
        state.apply(event)
    assert state.statistics.lengths.groups == ((7, 9),)


def test_the_earliest_lengths_are_forgotten() -> None:
    lengths = RecentLengths().followed_by([(1, 1)] * 10)
    for value in (5, 7):
        lengths = lengths.followed_by([(value, value)] * 4096)
    assert set(lengths.groups) == {(7, 7)}


def test_a_batch_that_is_handed_out_again_is_measured_once() -> None:
    events = [opened(0), opened(1), *decoded(0, (3, 0)), *decoded(1, (5, 0)), consumed(0, 0), published(1)]
    state = RolloutState([*events, consumed(1, 1)])
    before = numbers_of(state.statistics)
    for event in (restarted(0), consumed(0, 0), published(1)):
        state.apply(event)
    assert numbers_of(state.statistics) == before
    state.apply(consumed(1, 1))
    assert numbers_of(state.statistics) == before


def test_groups_with_siblings_have_no_baseline() -> None:
    state = RolloutState([opened(0, size=2), *decoded(0, (3, 0)), *decoded(0, (3, 0), index=1), opened(1)])
    assert state.statistics.baselines == {1: Baseline(0.0, 0.0, 0.0)}  # nor do their rewards make one for others
    assert [g.baseline for g in state.view.groups((0,))] == [None]


def test_baselines_live_as_long_as_their_groups() -> None:
    state = RolloutState([opened(i) for i in range(3)])
    for event in [*decoded(0, (3, 0)), consumed(0, 0), dropped(1)]:
        state.apply(event)
    assert set(state.statistics.baselines) == {0, 2}  # group 0 may be handed out again
    state.apply(CheckpointSaved(time_s=0.0, step=1))
    assert set(state.statistics.baselines) == {2}
