"""The rollout timeline: each sample a bar coloured by policy version, parked time a thin line."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from rollover.report import measures
from rollover.report.colours import version_colours
from rollover.report.measures import StepWindow
from rollover.report.plot import Figure, axis, figure, line
from rollover.report.timeline import DecodedSpan, SampleTrace, Timeline
from rollover.types import FinishReason

MAX_SPANS = 400
"""Bars per picture; of a larger window every k-th group is drawn. Each takes some 200 bytes of the page."""
OF_BARS: dict[str, Any] = {"barmode": "overlay", "bargap": 0, "margin": {"l": 48, "r": 14, "t": 44, "b": 40}}
"""Layout of figures with a row for each sample or member."""
_MAX_CHANGES = 600
"""Changes of the number of active samples that are drawn one by one; a picture has about as many columns of pixels."""


def gantt(timeline: Timeline, window: StepWindow, *, origin_s: float) -> Figure:
    """Draw one window's samples above and the active-batch curve below, on one time axis."""
    samples, every = thinned(measures.visible(timeline.samples, window))
    rows = measures.lanes(samples, window)
    placed = [(lane, sample) for lane, there in rows.items() for sample in there]
    data = [_parked(placed, window, origin_s), *_acting(placed, window, origin_s)]
    data += _by_version(placed, window, origin_s)
    data += _wasted(placed, window, origin_s)
    active = measures.clip_curve(timeline.active, window.start_s, window.end_s)
    data.append(_active(active if len(active) <= _MAX_CHANGES else measures.evenly(active, _MAX_CHANGES), origin_s))
    start, stop = window.start_s - origin_s, window.end_s - origin_s
    title = f"samples (one group in {every})" if every > 1 else "samples"
    rows_shown: dict[str, Any] = {"showticklabels": False, "showgrid": False, "range": [len(rows) - 0.3, -0.7]}
    return figure(
        data,
        height=max(320, min(680, 230 + 8 * len(rows))),
        **OF_BARS,
        xaxis=axis("seconds since the first rollout", showgrid=False, anchor="y2", range=[start, stop]),
        yaxis=axis(title, domain=[0.24, 1.0], **rows_shown),
        yaxis2=axis("active", domain=[0.0, 0.2], anchor="x", rangemode="tozero", nticks=4),
        shapes=[*training_bands(timeline, window, origin_s), *_restarts(timeline, window, origin_s)],
    )


def thinned(samples: Sequence[SampleTrace]) -> tuple[list[SampleTrace], int]:
    """Return the samples of every k-th group, and k, the smallest that keeps within ``MAX_SPANS``."""
    every = -(-sum(len(s.spans) for s in samples) // MAX_SPANS) or 1
    return [s for s in samples if s.sample_id.group % every == 0], every


def _bar(name: str, colour: str, width: float, **extra: Any) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "x": [],
        "y": [],
        "base": [],
        "width": width,
        "marker": {"color": colour, "line": {"width": 0}},
        **extra,
    }


def add_stretch(
    bar: dict[str, Any], lane: float, start_s: float, end_s: float, window: StepWindow, origin_s: float
) -> bool:
    """Put the part of an interval inside the window on the bar."""
    start_s, end_s = max(start_s, window.start_s), min(end_s, window.end_s)
    if end_s <= start_s:
        return False
    bar["y"].append(lane)
    bar["base"].append(round(start_s - origin_s, 3))
    bar["x"].append(round(end_s - start_s, 3))
    return True


def _parked(placed: Sequence[tuple[int, SampleTrace]], window: StepWindow, origin_s: float) -> dict[str, Any]:
    bar = _bar("parked", "--gap", 0.22, hovertemplate="parked<extra></extra>", legendrank=2000)
    for lane, sample in placed:
        for gap in sample.gaps:
            add_stretch(bar, lane, gap.start_s, gap.end_s, window, origin_s)
    return bar


def _acting(placed: Sequence[tuple[int, SampleTrace]], window: StepWindow, origin_s: float) -> list[dict[str, Any]]:
    """Draw the time in which environments act; nothing for a run without episodes."""
    bar = _bar("environment", "--yellow", 0.4, customdata=[], hovertemplate="%{customdata}<extra></extra>")
    for lane, sample in placed:
        for one in sample.acting:
            if add_stretch(bar, lane, one.start_s, one.end_s, window, origin_s):
                bar["customdata"].append(f"{sample.sample_id}: the environment answered with {one.num_tokens} tokens")
    return [bar] if bar["x"] else []


def _by_version(placed: Sequence[tuple[int, SampleTrace]], window: StepWindow, origin_s: float) -> list[dict[str, Any]]:
    inside = [
        (lane, sample, span)
        for lane, sample in placed
        for span in sample.spans
        if span.end_s > window.start_s and span.start_s < window.end_s
    ]
    bars = version_bars((span for _, _, span in inside), 0.84)
    for lane, sample, span in inside:
        bar = bars[span.policy_version]
        if add_stretch(bar, lane, span.start_s, span.end_s, window, origin_s):
            bar["customdata"].append(_hover(sample, span))
    return list(bars.values())


def version_bars(spans: Iterable[DecodedSpan], width: float) -> dict[int, dict[str, Any]]:
    """Return an empty set of bars for each policy version, in its colour."""
    colours = version_colours(span.policy_version for span in spans)
    extra = {"hovertemplate": "%{customdata}<extra></extra>"}
    return {
        version: _bar(f"v{version}", colour, width, customdata=[], legendrank=i, **extra)
        for i, (version, colour) in enumerate(colours.items())
    }


def _hover(sample: SampleTrace, span: DecodedSpan) -> str:
    ends = {
        FinishReason.ABORT: "parked",
        FinishReason.STOP: "finished",
        FinishReason.LENGTH: "ran into its limit",
        FinishReason.TURN: "ended a turn",
    }
    end = ends[span.finish_reason] if span.finish_reason is not None else "continued under new weights"
    trained = "not trained yet" if sample.trained_step is None else f"trained at step {sample.trained_step}"
    fate = trained if sample.waste is None else f"wasted: {sample.waste}"
    reward = "" if sample.reward is None else f", reward {sample.reward:g}"
    prompt = html.escape(sample.prompt_id)
    return (
        f"{sample.sample_id} under v{span.policy_version}:"
        f" {span.num_tokens} of {sample.num_tokens} tokens, {end}<br>{fate}{reward}<br>{prompt}"
    )


def _wasted(placed: Sequence[tuple[int, SampleTrace]], window: StepWindow, origin_s: float) -> list[dict[str, Any]]:
    """Draw a cross where a sample ended that was never trained."""
    found = [
        (sample.spans[-1].end_s, lane, f"wasted: {sample.waste}")
        for lane, sample in placed
        if sample.waste is not None and window.start_s < sample.spans[-1].end_s <= window.end_s
    ]
    return marks("never trained", found, origin_s, symbol="x-thin", size=7, line={"color": "--ink", "width": 1.6})


def marks(name: str, found: Sequence[tuple[float, int, str]], origin_s: float, **marker: Any) -> list[dict[str, Any]]:
    """Draw a mark for each (time_s, lane, text); nothing if there is none."""
    drawn = {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [round(time_s - origin_s, 3) for time_s, _, _ in found],
        "y": [lane for _, lane, _ in found],
        "customdata": [text for _, _, text in found],
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": marker,
        "legendrank": 2001,
    }
    return [drawn] if found else []


def _active(active: Sequence[tuple[float, int]], origin_s: float) -> dict[str, Any]:
    x, y = [round(t - origin_s, 3) for t, _ in active], [n for _, n in active]
    shape = {"line": {"color": "--blue", "width": 1.4, "shape": "hv"}, "fill": "tozeroy", "fillcolor": "--wash"}
    curve = line(x, y, "active", "--blue", yaxis="y2", showlegend=False, **shape)
    return {**curve, "hovertemplate": "%{y} samples decoding<extra></extra>"}


def training_bands(timeline: Timeline, window: StepWindow, origin_s: float) -> list[dict[str, Any]]:
    """Draw bands from the batch's consumption to the moment at which the weights it made are published."""
    published = {p.policy_version: p.time_s for p in timeline.publishes}
    bands = []
    for step in timeline.steps:
        start_s = max(step.consumed_s, window.start_s)
        end_s = min(published.get(step.step + 1, step.consumed_s), window.end_s)
        if end_s > start_s:
            filled = {"type": "rect", "fillcolor": "--band", "line": {"width": 0}, "layer": "below"}
            bands.append({**_upright(start_s - origin_s, end_s - origin_s), **filled})
    return bands


def _restarts(timeline: Timeline, window: StepWindow, origin_s: float) -> list[dict[str, Any]]:
    """Draw a dashed line where a new process took over."""
    inside = (t for t in timeline.restarts_s if window.start_s <= t <= window.end_s)
    dashes = {"type": "line", "line": {"color": "--red", "width": 1.4, "dash": "dash"}}
    return [{**_upright(t - origin_s, t - origin_s), **dashes} for t in inside]


def _upright(x0: float, x1: float) -> dict[str, Any]:
    """Return a shape over the whole height of the picture."""
    return {"xref": "x", "yref": "paper", "x0": round(x0, 3), "x1": round(x1, 3), "y0": 0, "y1": 1}
