"""Phases of a step do not overlap: none is negative, and shares of them add up to 100."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.report import run_figures
from rollover.report.metrics import MetricRow
from rollover.report.phases import PHASES, by_step, percentages, reward_waits_s
from rollover.report.summary import phases_text, summarize
from rollover.report.timeline import Timeline
from rollover.rollout.events import BatchConsumed, Event, Restarted, VersionPublished
from tests.report.synthetic import recorded
from tests.report.test_timeline import STOP, ended, opened, scored, started

SECONDS = st.floats(min_value=0, max_value=1e6, allow_nan=False)


def row(
    *, step_s: float, rollout_s: float, train_s: float = 0.0, publish_s: float = 0.0, work_s: float = 0.0
) -> MetricRow:
    times = {"time/step_s": step_s, "time/rollout_s": rollout_s, "time/train_s": train_s, "time/publish_s": publish_s}
    return MetricRow(kind="step", step=0, time_s=step_s, values={**times, "reward/work_s": work_s})


def slow_rewards(*, reward_s: float = 6.0) -> list[Event]:
    """Two samples end at 2 and at 4 seconds; each reward takes ``reward_s``; then the batch is full."""
    full_s = 4.0 + reward_s
    return [
        opened(0, 2),
        *(started(0, i, 0.0, 0) for i in range(2)),
        ended(0, 0, 0.0, 2.0, 0, 5, STOP),
        ended(0, 1, 0.0, 4.0, 0, 5, STOP),
        scored(0, 0, 2.0 + reward_s, 1.0),
        scored(0, 1, full_s, 0.0),
        BatchConsumed(time_s=full_s, step=0, group_ids=(0,)),
        VersionPublished(time_s=full_s + 2.0, policy_version=1, pause_s=0.5),
    ]


def test_rewards_take_the_time_in_which_nothing_else_happened() -> None:
    """Twelve seconds of work on two rewards; for six of them nothing decoded."""
    timeline = Timeline.of(slow_rewards())
    assert timeline.reward_waits == ((4.0, 10.0),)
    assert reward_waits_s(timeline) == {0: 6.0}
    step = row(step_s=12.0, rollout_s=10.0, train_s=1.5, publish_s=0.25, work_s=12.0)
    assert by_step([step], timeline) == {
        0: {"rollout": 4.0, "reward": 6.0, "train": 1.5, "publish": 0.25, "other": 0.25}
    }


def test_a_reward_that_comes_while_others_decode_costs_nothing() -> None:
    events = slow_rewards(reward_s=1.0)
    assert Timeline.of(events).reward_waits == ((4.0, 5.0),), "the first reward came at 3, while the second decoded"


def test_what_is_waited_for_after_the_batch_is_no_part_of_its_rollout() -> None:
    """A third sample ends before the batch is full and is scored while the trainer trains."""
    events = slow_rewards()
    extra = [opened(1, 1), started(1, 0, 0.0, 0), ended(1, 0, 0.0, 4.0, 0, 5, STOP)]
    events = sorted([*events, *extra, scored(1, 0, 11.5, 1.0)], key=lambda e: e.time_s)
    timeline = Timeline.of(events)
    assert timeline.reward_waits == ((4.0, 11.5),)
    assert reward_waits_s(timeline) == {0: 6.0}


def test_a_restart_begins_the_rollout_of_its_step_anew() -> None:
    """The rewards of the killed process were waited for before the weights of the new one were out."""
    before = slow_rewards()[:5]  # killed while two rewards are on their way
    after: list[Event] = [
        Restarted(time_s=20.0, step=0, redo_from=None, lost_tokens=0),
        VersionPublished(time_s=21.0, policy_version=0, pause_s=0.5),
        scored(0, 0, 22.0, 1.0),
        scored(0, 1, 23.0, 0.0),
        BatchConsumed(time_s=23.0, step=0, group_ids=(0,)),
    ]
    assert reward_waits_s(Timeline.of([*before, *after])) == {0: 2.0}


@given(
    st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=5),
    st.floats(min_value=0, max_value=1e4, allow_nan=False),
)
def test_phases_are_percents_that_sum_to_100(steps: list[tuple[float, float, float, float]], reward_s: float) -> None:
    """Also where clocks disagree and the phases are longer than the step, and where rewards are very slow."""
    timeline = Timeline.of(slow_rewards(reward_s=reward_s))
    rows = [row(step_s=a, rollout_s=b, train_s=c, publish_s=d, work_s=1e9) for a, b, c, d in steps]
    summary = summarize(rows, timeline)
    assert set(summary.phase_s) == set(PHASES) and all(s >= 0 for s in summary.phase_s.values())
    found = percentages(summary.phase_s)
    assert all(share >= 0 for share in found.values())
    assert sum(found.values()) == (100 if any(summary.phase_s.values()) else 0)
    assert phases_text(summary) == ", ".join(f"{phase} {found[phase]}%" for phase in PHASES)


def test_percentages_give_what_is_left_to_those_that_lost_most() -> None:
    assert percentages({"a": 50.3, "b": 2.9, "c": 46.8}) == {"a": 50, "b": 3, "c": 47}
    assert percentages({"a": 1.0, "b": 1.0, "c": 1.0}) == {"a": 34, "b": 33, "c": 33}
    assert percentages({"a": 0.0}) == {"a": 0}


def test_the_bars_of_a_step_are_as_high_as_the_step() -> None:
    step = row(step_s=12.0, rollout_s=10.0, train_s=1.5, publish_s=0.25, work_s=43.0)
    drawn = run_figures.time_split(recorded(slow_rewards(), [step]))
    assert drawn is not None
    assert sum(bar["y"][0] for bar in drawn["data"]) == pytest.approx(12.0)
    assert min(bar["y"][0] for bar in drawn["data"]) >= 0
