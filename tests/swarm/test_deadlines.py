"""When a training step waits for a response: from the pace of publications, and the version its group starts under."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.swarm.coordinator.machine.deadlines import NUM_INTERVALS, Deadline, Pace


def pace(*published: tuple[int, float]) -> Pace:
    known = Pace()
    for version, at_s in published:
        known.published(version, at_s)
    return known


def test_a_version_is_expected_one_step_after_another() -> None:
    known = pace((3, 100.0), (4, 130.0), (5, 160.0))
    assert known.step_s == 30.0 and known.since_s(170.0) == 10.0
    assert [known.until_s(version, 170.0) for version in (4, 5, 6, 7)] == [0.0, 0.0, 20.0, 50.0]


def test_a_version_that_is_overdue_may_come_at_any_time_and_the_next_one_a_step_later() -> None:
    known = pace((3, 100.0), (4, 130.0))
    assert [known.until_s(version, 500.0) for version in (5, 6, 7)] == [0.0, 30.0, 60.0]


def test_before_the_second_publication_nothing_is_due_that_is_not_due_already() -> None:
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


def test_an_older_version_takes_steps_off_the_time_of_a_group_that_starts_under_it() -> None:
    deadline = pace((5, 160.0), (6, 190.0), (7, 220.0)).of_first(7, 3, 230.0)
    assert deadline == Deadline(due_version=10, left_s=80.0, start_version=7, per_version_s=30.0)
    assert [deadline.under(version) for version in (7, 6, 5, 4)] == [80.0, 50.0, 20.0, 0.0]


def test_the_time_of_a_group_that_has_started_is_the_same_wherever_its_calls_are() -> None:
    deadline = pace((6, 190.0), (7, 220.0)).of_started(9, 230.0)
    assert [deadline.under(version) for version in (9, 7, 0)] == [50.0, 50.0, 50.0]


@pytest.mark.parametrize("max_staleness", [0, 4])
def test_while_the_pace_is_not_known_a_first_call_is_due_at_once_or_never(max_staleness: int) -> None:
    deadline = pace((7, 220.0)).of_first(7, max_staleness, 230.0)
    assert [deadline.under(version) for version in (7, 5)] == [math.inf if max_staleness else 0.0] * 2


@given(
    st.lists(st.floats(0.1, 1e4), min_size=1, max_size=20),
    st.floats(0, 1e5),
    st.integers(0, 8),
    st.integers(0, 8),
)
def test_a_first_call_has_the_time_until_its_own_step_whichever_version_it_starts_under(
    intervals: list[float], elapsed_s: float, max_staleness: int, age: int
) -> None:
    """The line through the versions says of each what the pace says of its step."""
    known, at_s = Pace(), 0.0
    known.published(0, at_s)
    for version, interval_s in enumerate(intervals, 1):
        at_s += interval_s
        known.published(version, at_s)
    newest, now_s = len(intervals), at_s + elapsed_s
    left_s = known.of_first(newest, max_staleness, now_s).under(newest - age)
    assert left_s == pytest.approx(known.until_s(newest - age + max_staleness, now_s), abs=1e-6)
    assert known.of_first(newest, max_staleness, now_s + 1.0).under(newest) <= left_s or age
    assert known.of_first(newest, max_staleness, now_s).under(newest) >= left_s
