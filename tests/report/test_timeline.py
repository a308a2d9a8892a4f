"""The timeline says what the events said, and its token account is the ledger's."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rollover.batch import WasteCause
from rollover.report import measures
from rollover.report.measures import LengthSummary
from rollover.report.timeline import DecodedSpan, Gap, SampleTrace, Timeline
from rollover.rollout.events import (
    BatchConsumed,
    BatchTrained,
    Event,
    GroupDropped,
    GroupOpened,
    Restarted,
    SampleFailed,
    SampleScored,
    SampleStarted,
    SegmentEnded,
    VersionPublished,
)
from rollover.rollout.lag import BatchLag, LagSummary
from rollover.rollout.ledger import Ledger
from rollover.types import FinishReason, Prompt, SampleId
from tests.report.synthetic import Simulation
from tests.segments import segment

ABORT, STOP = FinishReason.ABORT, FinishReason.STOP


def opened(group: int, size: int, t: float = 0.0) -> GroupOpened:
    prompt = Prompt(prompt_id=f"p/{group}", token_ids=(1,), text=f"prompt {group}", source="p")
    return GroupOpened(time_s=t, group_id=group, prompt=prompt, group_size=size, cursor=group + 1)


def started(group: int, index: int, t: float, version: int) -> SampleStarted:
    return SampleStarted(time_s=t, sample_id=SampleId(group, index), policy_version=version)


def ended(
    group: int,
    index: int,
    start_s: float,
    end_s: float,
    version: int,
    tokens: int,
    reason: FinishReason | None,
    prefilled: int = 0,
) -> SegmentEnded:
    times = {"start_s": start_s, "end_s": end_s}
    decoded = segment(tokens, reason, version=version, **times, num_prefilled_tokens=prefilled)
    return SegmentEnded(end_s, SampleId(group, index), decoded)


def scored(group: int, index: int, t: float, reward: float) -> SampleScored:
    return SampleScored(time_s=t, sample_id=SampleId(group, index), reward=reward)


ROLLED_OVER: list[Event] = [
    opened(0, 1),
    opened(1, 2),
    started(0, 0, 1.0, 0),
    started(1, 0, 1.0, 0),
    started(1, 1, 1.0, 0),
    ended(0, 0, 1.0, 3.0, 0, 10, STOP),
    scored(0, 0, 3.0, 1.0),
    ended(1, 0, 1.0, 3.5, 0, 12, ABORT),
    ended(1, 1, 1.0, 3.5, 0, 13, ABORT),
    BatchConsumed(time_s=4.0, step=0, group_ids=(0,)),
    VersionPublished(time_s=5.0, policy_version=1, pause_s=0.5),
    started(1, 0, 5.5, 1),
    started(1, 1, 5.5, 1),
    ended(1, 0, 5.5, 6.0, 1, 4, STOP, prefilled=12),
    ended(1, 1, 5.5, 7.0, 1, 7, STOP, prefilled=13),
    scored(1, 0, 7.0, 0.0),
    scored(1, 1, 7.0, 1.0),
    BatchConsumed(time_s=8.0, step=1, group_ids=(1,)),
]
"""Group 0 trains at step 0; group 1 is parked, resumed under version 1 and trains at step 1."""


def test_a_rolled_over_sample_is_two_spans_and_the_gap_between() -> None:
    trace = Timeline.of(ROLLED_OVER).samples[1]
    assert trace == SampleTrace(
        sample_id=SampleId(1, 0),
        prompt_id="p/1",
        num_prompt_tokens=1,
        spans=(
            DecodedSpan(start_s=1.0, end_s=3.5, policy_version=0, num_tokens=12, finish_reason=ABORT),
            DecodedSpan(start_s=5.5, end_s=6.0, policy_version=1, num_tokens=4, finish_reason=STOP),
        ),
        gaps=(Gap(start_s=3.5, end_s=5.5),),
        reward=0.0,
        trained_step=1,
    )
    assert trace.finished
    assert (trace.num_tokens, trace.num_resumes) == (16, 1)


def test_saved_progress_does_not_cut_a_span() -> None:
    saved = [
        ended(0, 0, 1.0, 2.0, 0, 256, None),
        ended(0, 0, 2.0, 3.0, 0, 256, None),
        ended(0, 0, 3.0, 3.5, 0, 9, STOP),
    ]
    (sample,) = Timeline.of([opened(0, 1), started(0, 0, 1.0, 0), *saved]).samples
    assert sample.spans == (DecodedSpan(start_s=1.0, end_s=3.5, policy_version=0, num_tokens=521, finish_reason=STOP),)


def test_the_active_curve_counts_samples_at_the_engine() -> None:
    assert Timeline.of(ROLLED_OVER).active == ((1.0, 3), (3.0, 2), (3.5, 0), (5.5, 2), (6.0, 1), (7.0, 0))


def test_staleness_is_the_step_minus_the_version_weighted_by_tokens() -> None:
    timeline = Timeline.of(ROLLED_OVER)
    assert timeline.steps[1].lag == BatchLag([{0: 11, 1: 25}])
    assert measures.lag_histogram(timeline.steps) == {0: 21, 1: 25}
    assert measures.lag(timeline.steps) == LagSummary(
        token=25 / 46, batch=25 / 72, group=25 / 72, head=1 / 2, p95=1, max=1, off_policy_fraction=25 / 46
    )


def test_a_sample_still_parked_has_a_gap_up_to_the_last_event() -> None:
    timeline = Timeline.of(ROLLED_OVER[:11])
    assert timeline.samples[1].gaps == (Gap(start_s=3.5, end_s=5.0),)
    assert timeline.live_tokens == 25 and timeline.wasted_tokens == {}


def test_a_version_without_tokens_divides_nothing() -> None:
    events: list[Event] = [opened(0, 1), started(0, 0, 1.0, 0), ended(0, 0, 1.0, 1.0, 0, 0, ABORT)]
    timeline = Timeline.of(events)
    assert timeline.samples[0].gaps == ()
    assert measures.lag(timeline.steps) is None
    assert measures.lengths(measures.generated_lengths(timeline.samples)) is None


def test_no_events_make_an_empty_timeline() -> None:
    timeline = Timeline.of([])
    assert (timeline.samples, timeline.decoded_tokens, timeline.live_tokens, timeline.end_s) == ((), 0, 0, 0.0)
    assert measures.windows(timeline, num_steps=6, max_windows=6) == ()


FAILED_SIBLING: list[Event] = [
    opened(0, 2),
    started(0, 0, 1.0, 0),
    started(0, 1, 1.0, 0),
    ended(0, 0, 1.0, 2.0, 0, 5, STOP),
    SampleFailed(time_s=2.5, sample_id=SampleId(0, 0), reason="reward raised"),
]


def test_waste_has_the_cause_of_the_drop_and_a_failed_sample_its_own() -> None:
    events: list[Event] = [
        *FAILED_SIBLING,
        ended(0, 1, 1.0, 3.0, 0, 8, ABORT),
        GroupDropped(time_s=4.0, group_id=0, cause=WasteCause.DISCARDED_ON_ABORT, prompt_returned=True),
        opened(1, 1),
        started(1, 0, 4.0, 0),
        ended(1, 0, 4.0, 5.0, 0, 3, STOP),
        scored(1, 0, 5.0, 1.0),
        GroupDropped(time_s=6.0, group_id=1, cause=WasteCause.SURPLUS_GROUP, prompt_returned=False),
    ]
    timeline = Timeline.of(events)
    assert timeline.wasted_tokens == Ledger(events).tokens.wasted
    assert measures.waste_curves(timeline.waste) == {
        WasteCause.FAILED: ((2.5, 5),),
        WasteCause.DISCARDED_ON_ABORT: ((4.0, 8),),
        WasteCause.SURPLUS_GROUP: ((6.0, 3),),
    }
    causes = [WasteCause.FAILED, WasteCause.DISCARDED_ON_ABORT, WasteCause.SURPLUS_GROUP]
    assert [s.waste for s in timeline.samples] == causes
    assert timeline.samples[1].gaps == (Gap(start_s=3.0, end_s=4.0),)


def test_a_failed_sibling_is_waste_and_no_part_of_its_groups_batch() -> None:
    trained = [ended(0, 1, 1.0, 3.0, 0, 8, STOP), scored(0, 1, 3.0, 1.0), BatchConsumed(4.0, 0, (0,))]
    timeline = Timeline.of([*FAILED_SIBLING, *trained])
    assert (timeline.trained_tokens, timeline.steps[0].num_samples) == (8, 1)
    assert timeline.wasted_tokens == {WasteCause.FAILED: 5} and timeline.live_tokens == 0
    assert measures.trained_lengths(timeline.samples) == (8,)


def test_a_restart_untrains_the_batches_it_repeats_and_empties_the_engine() -> None:
    before = [*ROLLED_OVER, opened(2, 1, 8.0), started(2, 0, 8.0, 2), ended(2, 0, 8.0, 9.0, 2, 6, None)]
    crashed = [*before, Restarted(time_s=12.0, step=1, redo_from=None, lost_tokens=5)]
    timeline = Timeline.of(crashed)
    assert [s.step for s in timeline.steps] == [0]
    assert [s.trained_step for s in timeline.samples] == [0, None, None, None]
    assert timeline.active[-1] == (12.0, 0) and timeline.restarts_s == (12.0,)
    assert timeline.wasted_tokens == {WasteCause.FAILED: 5}
    assert timeline.samples[3].gaps == (Gap(start_s=9.0, end_s=12.0),)

    replayed = [*crashed, BatchConsumed(time_s=13.0, step=1, group_ids=(1,)), started(2, 0, 14.0, 2)]
    again = Timeline.of(replayed)
    assert [s.step for s in again.steps] == [0, 1] and again.trained_tokens == 46
    assert again.samples[3].gaps == (Gap(start_s=9.0, end_s=14.0),)
    ledger = Ledger(replayed)
    assert (again.decoded_tokens, again.live_tokens) == (ledger.tokens.decoded, ledger.tokens.live)


def test_a_restart_takes_back_the_waste_of_the_steps_it_repeats() -> None:
    first = BatchTrained(time_s=4.2, step=0, untrained={WasteCause.MASKED_STALE: 3})
    second = BatchTrained(time_s=8.2, step=1, untrained={WasteCause.ZERO_ADVANTAGE: 7})
    at = next(i for i, e in enumerate(ROLLED_OVER) if isinstance(e, BatchConsumed)) + 1
    events = [*ROLLED_OVER[:at], first, *ROLLED_OVER[at:], second]
    timeline = Timeline.of(events)
    assert [(p.time_s, p.cause, p.num_tokens) for p in timeline.waste] == [
        (4.2, WasteCause.MASKED_STALE, 3),
        (8.2, WasteCause.ZERO_ADVANTAGE, 7),
    ]
    assert timeline.trained_tokens == 36 and timeline.live_tokens == 0
    again = [*events, Restarted(time_s=12.0, step=1, redo_from=None, lost_tokens=0)]
    assert Timeline.of(again).wasted_tokens == {WasteCause.MASKED_STALE: 3}
    replayed = [*again, BatchConsumed(time_s=13.0, step=1, group_ids=(1,)), second._replace(time_s=14.0)]
    for upto in (events, again, replayed):
        timeline, tokens = Timeline.of(upto), Ledger(upto).tokens
        assert (timeline.trained_tokens, timeline.wasted_tokens) == (tokens.trained, +tokens.wasted)
    assert [p.time_s for p in Timeline.of(replayed).waste] == [4.2, 14.0]


@pytest.mark.parametrize("strategy", ["sync", "april"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_account_is_the_ledgers_after_every_batch(strategy: str, seed: int) -> None:
    events = Simulation(num_steps=6, strategy=strategy, seed=seed).events
    cuts = [i + 1 for i, e in enumerate(events) if isinstance(e, BatchConsumed)]
    for cut in [*cuts, len(events)]:
        timeline, tokens = Timeline.of(events[:cut]), Ledger(events[:cut]).tokens
        assert timeline.decoded_tokens == tokens.decoded
        assert timeline.trained_tokens == tokens.trained
        assert timeline.wasted_tokens == tokens.wasted
        assert timeline.live_tokens == tokens.live
        assert timeline.num_reprefilled_tokens == tokens.reprefilled


def test_lengths_leave_out_what_goes_on_and_those_of_trained_samples_what_never_trained() -> None:
    timeline = Timeline.of(ROLLED_OVER[:11])
    assert measures.generated_lengths(timeline.samples) == (10,)
    given_up = SampleFailed(time_s=6.0, sample_id=SampleId(1, 0), cause=WasteCause.FAILED, reason="")
    assert measures.generated_lengths(Timeline.of([*ROLLED_OVER[:11], given_up]).samples) == (10, 12)
    assert measures.trained_lengths(timeline.samples) == (10,)
    assert measures.lengths([10, 12, 13, 1]) == LengthSummary(mean=9.0, median=10, p95=13, max=13)


def test_a_clipped_step_curve_starts_and_ends_with_the_value_in_force() -> None:
    active = ((1.0, 4), (3.0, 2), (4.0, 0))
    assert measures.clip_curve(active, 2.0, 4.0) == ((2.0, 4), (3.0, 2), (4.0, 2))
    assert measures.clip_curve(active, 3.0, 9.0) == ((3.0, 2), (4.0, 0), (9.0, 0))
    assert measures.clip_curve(active, 0.0, 2.0) == ((0.0, 0), (1.0, 4), (2.0, 4))


def test_windows_tile_the_run_and_count_the_samples_that_go_on_in_them() -> None:
    timeline = Timeline.of(ROLLED_OVER)
    first, second = measures.windows(timeline, num_steps=1, max_windows=6)
    assert (first.start_s, first.end_s, first.num_resumes) == (0.0, 4.0, 0)
    assert (second.start_s, second.end_s, second.num_resumes) == (4.0, 8.0, 2)


def test_of_many_windows_the_first_and_the_last_stay() -> None:
    found = measures.windows(Timeline.of(Simulation(num_steps=20).events), num_steps=2, max_windows=3)
    assert [(w.first_step, w.last_step) for w in found] == [(0, 1), (8, 9), (18, 19)]


def test_samples_of_one_row_never_overlap_and_none_is_missing() -> None:
    timeline = Timeline.of(Simulation(num_steps=8).events)
    for window in measures.windows(timeline, num_steps=3, max_windows=9):
        rows = measures.lanes(timeline.samples, window)
        placed = [s.sample_id for there in rows.values() for s in there]
        assert sorted(placed) == [s.sample_id for s in measures.visible(timeline.samples, window)]
        for there in rows.values():
            for before, after in pairwise(there):
                ends = [p.end_s for p in before.spans] + [g.end_s for g in before.gaps]
                assert max(ends) <= after.spans[0].start_s
