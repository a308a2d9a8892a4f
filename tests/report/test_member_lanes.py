"""Lanes of members: who decoded what, in which row, and where its weights changed."""

from __future__ import annotations

from dataclasses import replace

from rollover.report.measures import StepWindow
from rollover.report.member_lanes import MAX_MEMBERS, by_member, changes, has_members, member_lanes
from rollover.report.timeline import DecodedSpan, SampleTrace, Timeline
from rollover.types import FinishReason, SampleId

WINDOW = StepWindow(first_step=0, last_step=1, start_s=0.0, end_s=100.0, num_resumes=0)


def span(engine: str, start_s: float, end_s: float, version: int = 0, num_tokens: int = 5) -> DecodedSpan:
    return DecodedSpan(
        start_s=start_s,
        end_s=end_s,
        policy_version=version,
        num_tokens=num_tokens,
        finish_reason=FinishReason.STOP,
        engine=engine,
    )


def sample(i: int, *spans: DecodedSpan) -> SampleTrace:
    return SampleTrace(sample_id=SampleId(i, 0), prompt_id=f"p{i}", num_prompt_tokens=1, spans=spans)


def timeline(*samples: SampleTrace) -> Timeline:
    return replace(Timeline.of(()), samples=samples, end_s=100.0)


def test_a_lane_has_as_many_rows_as_its_member_decoded_samples_at_once() -> None:
    samples = [
        sample(0, span("attic", 0.0, 10.0)),
        sample(1, span("attic", 2.0, 6.0)),
        sample(2, span("attic", 6.0, 9.0), span("kitchen", 20.0, 30.0, version=1)),
        sample(3, span("kitchen", 0.0, 5.0)),
    ]
    lanes = by_member(samples, WINDOW)
    assert [*lanes] == ["attic", "kitchen"]
    rows = {name: [(each.sample.sample_id.group, each.row) for each in spans] for name, spans in lanes.items()}
    assert rows == {"attic": [(0, 0), (1, 1), (2, 1)], "kitchen": [(3, 0), (2, 0)]}


def test_what_is_outside_the_window_or_empty_is_left_out() -> None:
    samples = [
        sample(0, span("a", 100.0, 110.0)),
        sample(1, span("b", 1.0, 2.0, num_tokens=0)),
        sample(2, span("c", 99.0, 120.0)),
    ]
    assert [*by_member(samples, WINDOW)] == ["c"]


def test_a_change_of_weights_says_how_long_nothing_was_decoded() -> None:
    """Two samples end at 10 s and 12 s under v0; v1 begins at 12.4 s; a straggler of v0 and a later v1 change nothing."""
    samples = [
        sample(0, span("a", 0.0, 10.0)),
        sample(1, span("a", 1.0, 12.0)),
        sample(2, span("a", 12.4, 20.0, version=1)),
        sample(3, span("a", 13.0, 14.0, version=0)),
        sample(4, span("a", 15.0, 16.0, version=3)),
    ]
    found = changes(by_member(samples, WINDOW)["a"])
    assert [(c.before, c.after, round(c.idle_s, 3)) for c in found] == [(0, 1, 0.4), (1, 3, 0.0)]


def test_the_picture_has_a_lane_for_each_member_with_escaped_names() -> None:
    drawn = member_lanes(
        timeline(sample(0, span("<b>a", 0.0, 10.0)), sample(1, span("z", 5.0, 8.0, version=2))), WINDOW, origin_s=0.0
    )
    assert drawn["layout"]["yaxis"]["ticktext"] == ["&lt;b&gt;a", "z"]
    bars = {trace["name"]: trace for trace in drawn["data"] if trace["type"] == "bar"}
    assert bars["v0"]["base"] == [0.0] and bars["v0"]["x"] == [10.0] and bars["v0"]["y"] == [0.0]
    assert bars["v2"]["y"] == [1.0] and "under v2, 5 of 5 tokens in 3.00 s" in bars["v2"]["customdata"][0]


def test_of_very_many_members_those_that_decoded_most_are_drawn() -> None:
    samples = [sample(i, span(f"w{i:03}", 0.0, 1.0, num_tokens=1 + i)) for i in range(MAX_MEMBERS + 3)]
    drawn = member_lanes(timeline(*samples), WINDOW, origin_s=0.0)
    assert drawn["layout"]["yaxis"]["ticktext"] == [f"w{i:03}" for i in range(3, MAX_MEMBERS + 3)]
    assert drawn["layout"]["yaxis"]["title"]["text"] == "3 members that decoded less are left out"


def test_a_run_with_one_nameless_engine_has_no_lanes() -> None:
    assert not has_members(timeline(sample(0, span("", 0.0, 1.0))))
    assert has_members(timeline(sample(0, span("a", 0.0, 1.0))))
