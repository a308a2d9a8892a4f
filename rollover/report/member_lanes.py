"""The samples of each engine over time: a lane for each member of a swarm or server, coloured by policy version.

Inside a lane its samples are stacked as thin bars, so that a lane is as full as its member was busy. A mark is a change
of weights: how long the member had decoded nothing before it is in its text.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollover.report import measures
from rollover.report.measures import StepWindow
from rollover.report.plot import Figure, axis, figure
from rollover.report.timeline import DecodedSpan, SampleTrace, Timeline
from rollover.report.timeline_figure import OF_BARS, add_stretch, marks, thinned, training_bands, version_bars

MAX_MEMBERS = 40
"""Maximum number of lanes in a picture; of more members, the members that decoded most are drawn."""
_LANE = 0.86
"""Fraction of a lane that its bars fill."""


@dataclass(frozen=True, slots=True)
class MemberSpan:
    """A stretch that one member decoded, and its row inside the member's lane."""

    sample: SampleTrace
    span: DecodedSpan
    row: int


@dataclass(frozen=True, slots=True)
class VersionChange:
    """A member's first token of other weights than before."""

    time_s: float
    before: int
    after: int
    idle_s: float


def has_members(timeline: Timeline) -> bool:
    """Tell whether the run's tokens came from engines that have names."""
    return any(span.engine for sample in timeline.samples for span in sample.spans)


def by_member(samples: Iterable[SampleTrace], window: StepWindow) -> dict[str, tuple[MemberSpan, ...]]:
    """Return the spans of each member that show in the window, in order of their start, each in a row where no other
    overlaps it; members in order of their names.
    """
    found: defaultdict[str, list[tuple[SampleTrace, DecodedSpan]]] = defaultdict(list)
    for sample in samples:
        for span in sample.spans:
            if span.num_tokens and span.end_s > window.start_s and span.start_s < window.end_s:
                found[span.engine].append((sample, span))
    return {name: _packed(found[name]) for name in sorted(found)}


def _packed(spans: Iterable[tuple[SampleTrace, DecodedSpan]]) -> tuple[MemberSpan, ...]:
    ordered = sorted(spans, key=lambda pair: (pair[1].start_s, pair[0].sample_id))
    rows = measures.packed((span.start_s, span.end_s) for _, span in ordered)
    return tuple(MemberSpan(sample, span, row) for (sample, span), row in zip(ordered, rows, strict=True))


def changes(spans: Sequence[MemberSpan]) -> tuple[VersionChange, ...]:
    """Return a member's changes to newer weights, given its spans in order of their start."""
    found: list[VersionChange] = []
    newest: int | None = None
    last_end_s = 0.0
    for each in spans:
        span = each.span
        if newest is None or span.policy_version > newest:
            if newest is not None:
                idle_s = max(0.0, span.start_s - last_end_s)
                found.append(VersionChange(span.start_s, newest, span.policy_version, idle_s))
            newest = span.policy_version
        last_end_s = max(last_end_s, span.end_s)
    return tuple(found)


def member_lanes(timeline: Timeline, window: StepWindow, *, origin_s: float) -> Figure:
    """Draw one window's lanes, the first name at the top."""
    samples, every = thinned(measures.visible(timeline.samples, window))
    members = by_member(samples, window)
    names, left_out = _shown(members)
    data = _bars({name: members[name] for name in names}, window, origin_s)
    data += _marks({name: members[name] for name in names}, window, origin_s)
    title = "seconds since the first rollout"
    said = [f"one group in {every}"] if every > 1 else []
    said += [f"{left_out} members that decoded less are left out"] if left_out else []
    return figure(
        data,
        height=max(230, min(900, 120 + 34 * len(names))),
        **OF_BARS,
        xaxis=axis(title, showgrid=False, range=[window.start_s - origin_s, window.end_s - origin_s]),
        yaxis=axis(
            "; ".join(said),
            showgrid=False,
            tickvals=list(range(len(names))),
            ticktext=[html.escape(name or "this machine") for name in names],
            range=[len(names) - 0.4, -0.6],
        ),
        shapes=[*training_bands(timeline, window, origin_s), *_separators(len(names))],
    )


def _shown(members: Mapping[str, Sequence[MemberSpan]]) -> tuple[list[str], int]:
    """Return the names to draw, in order, and how many are left out."""
    if len(members) <= MAX_MEMBERS:
        return list(members), 0
    most = sorted(members, key=lambda name: (-sum(each.span.num_tokens for each in members[name]), name))
    return sorted(most[:MAX_MEMBERS]), len(members) - MAX_MEMBERS


def _bars(members: Mapping[str, Sequence[MemberSpan]], window: StepWindow, origin_s: float) -> list[dict[str, Any]]:
    bars = version_bars((each.span for spans in members.values() for each in spans), _LANE)
    for bar in bars.values():
        bar["width"] = []
    for lane, (name, spans) in enumerate(members.items()):
        num_rows = 1 + max(each.row for each in spans)
        for each in spans:
            bar = bars[each.span.policy_version]
            place = round(lane - _LANE / 2 + _LANE * (each.row + 0.5) / num_rows, 4)
            if add_stretch(bar, place, each.span.start_s, each.span.end_s, window, origin_s):
                bar["width"].append(round(_LANE / num_rows * 0.9, 4))
                bar["customdata"].append(_hover(name, each))
    return list(bars.values())


def _hover(name: str, each: MemberSpan) -> str:
    span = each.span
    return (
        f"{html.escape(name)}: {each.sample.sample_id} under v{span.policy_version}, {span.num_tokens} of"
        f" {each.sample.num_tokens} tokens in {span.end_s - span.start_s:.2f} s"
    )


def _marks(members: Mapping[str, Sequence[MemberSpan]], window: StepWindow, origin_s: float) -> list[dict[str, Any]]:
    """Draw a mark where a member continued under newer weights."""
    found = [
        (change.time_s, lane, f"v{change.before} to v{change.after}, nothing decoded for {change.idle_s:.2f} s before")
        for lane, spans in enumerate(members.values())
        for change in changes(spans)
        if window.start_s <= change.time_s <= window.end_s
    ]
    return marks("new weights", found, origin_s, symbol="line-ns", size=24, line={"color": "--ink", "width": 1.4})


def _separators(num_lanes: int) -> list[dict[str, Any]]:
    """Draw thin lines between lanes."""
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": {"color": "--grid", "width": 1}}
    return [{**line, "y0": lane + 0.5, "y1": lane + 0.5} for lane in range(num_lanes - 1)]
