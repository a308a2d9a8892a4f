"""Forecasts: when a training step waits for a response, and how many tokens a response has left."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.swarm.coordinator.machine.placing.forecast import NUM_INTERVALS, WINDOW, Deadline, Pace, RemainingTokens


def left(deadline: Deadline, *versions: int) -> list[float]:
    return [deadline.under(version) for version in versions]


def pace(*published: tuple[int, float]) -> Pace:
    known = Pace()
    for version, at_s in published:
        known.published(version, at_s)
    return known


def test_a_version_is_expected_one_step_after_another() -> None:
    known = pace((3, 100.0), (4, 130.0), (5, 160.0))
    assert known.step_s == 30.0 and known.since_s(170.0) == 10.0
    assert [known.until_s(version, 170.0) for version in (4, 5, 6, 7)] == [0.0, 0.0, 20.0, 50.0]


def test_an_overdue_version_may_come_now_and_the_next_a_step_later() -> None:
    known = pace((3, 100.0), (4, 130.0))
    assert [known.until_s(version, 500.0) for version in (5, 6, 7)] == [0.0, 30.0, 60.0]


def test_before_the_second_publication_the_pace_is_not_known() -> None:
    for known in (pace((3, 100.0)), pace((3, 100.0), (3, 400.0))):
        assert known.step_s == math.inf
        assert [known.until_s(version, 500.0) for version in (3, 4)] == [0.0, math.inf]
    assert pace().until_s(0, 500.0) == math.inf


def test_versions_that_were_skipped_share_the_time() -> None:
    assert pace((3, 100.0), (7, 180.0)).step_s == 20.0


def test_an_evaluation_between_two_steps_is_not_taken_for_the_pace() -> None:
    assert pace((0, 0.0), (1, 20.0), (2, 40.0), (3, 640.0), (4, 660.0)).step_s == 20.0
    assert pace((0, 0.0), (1, 900.0), (2, 920.0)).step_s == 20.0, "the first step began when the first worker had come"


def test_the_pace_is_that_of_the_last_steps() -> None:
    known, at_s = Pace(), 0.0
    for version in range(40):
        known.published(version, at_s)
        at_s += 10.0 if version < 40 - NUM_INTERVALS - 1 else 60.0
    assert known.step_s == 60.0


def test_a_started_group_has_the_same_time_at_every_member() -> None:
    deadline = pace((6, 190.0), (7, 220.0)).of_started(9, 230.0)
    assert left(deadline, 9, 7, 0) == [50.0, 50.0, 50.0]


@pytest.mark.parametrize("max_staleness", [0, 4])
def test_while_the_pace_is_not_known_a_first_call_is_due_at_once_or_never(max_staleness: int) -> None:
    deadline = pace((7, 220.0)).of_first(7, max_staleness, 230.0)
    assert left(deadline, 7, 5) == [math.inf if max_staleness else 0.0] * 2


@given(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=20), st.floats(0, 1e5), st.integers(0, 8), st.integers(0, 8))
def test_a_first_call_has_the_time_until_its_own_step(
    intervals: list[float], elapsed_s: float, max_staleness: int, age: int
) -> None:
    """The line through the versions says of each what the pace says of its step."""
    known, at_s = Pace(), 0.0
    known.published(0, at_s)
    for version, interval_s in enumerate(intervals, 1):
        at_s += interval_s
        known.published(version, at_s)
    newest, now_s = len(intervals), at_s + elapsed_s
    (left_s,) = left(known.of_first(newest, max_staleness, now_s), newest - age)
    assert left_s == pytest.approx(known.until_s(newest - age + max_staleness, now_s), abs=1e-6)
    assert left(known.of_first(newest, max_staleness, now_s + 1.0), newest)[0] <= left_s or age
    assert left(known.of_first(newest, max_staleness, now_s), newest)[0] >= left_s


def test_what_is_left_is_the_mean_of_the_longer_ones() -> None:
    lengths = RemainingTokens()
    assert lengths.expected(0, 100) == 50.0, "nothing is known: half of what the limit leaves"
    for length in (10, 20, 300):
        lengths.ended(length)
    assert lengths.expected(0, 512) == 110.0
    assert lengths.expected(15, 512) == 145.0
    assert lengths.expected(15, 100) == 85.0, "no more than the limit leaves"
    assert lengths.expected(300, 512) == 106.0


def test_old_lengths_are_forgotten() -> None:
    lengths = RemainingTokens()
    for length in [1000] * WINDOW + [10] * WINDOW:
        lengths.ended(length)
    assert lengths.expected(0, 2000) == 10.0
