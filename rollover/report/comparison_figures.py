"""Figures that lay several runs over one another, one colour per run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from statistics import fmean
from typing import Any

from rollover.report import downsampling, measures, run_figures
from rollover.report.colours import PHASE_COLOURS, RUN_COLOURS
from rollover.report.plot import LEGEND, Figure, axis, bar, figure, label, line, smoothed, time_unit
from rollover.report.record import RunRecord, distinct_names
from rollover.report.summary import RunSummary


def _coloured(records: Sequence[RunRecord]) -> Iterator[tuple[str, str, RunRecord]]:
    return zip(distinct_names(records), cycle(RUN_COLOURS), records, strict=False)


def learning(records: Sequence[RunRecord], *, over_time: bool) -> Figure | None:
    """Draw accuracy above and smoothed reward below."""
    unit, unit_s = time_unit(max(map(run_figures.span_s, records)))
    data = []
    for name, colour, record in _coloured(records):
        scale = unit_s if over_time else None
        x, accuracy = run_figures.points(record, "eval", "accuracy", unit_s=scale)
        marks = {"mode": "lines+markers", "marker": {"color": colour, "size": 7}}
        if accuracy:
            marked: dict[str, Any] = marks if len(accuracy) <= downsampling.MAX_POINTS else {}
            curve = downsampling.coarsened(x, accuracy)
            data.append(line(*curve, name, colour, legendgroup=label(name), **marked))
        x, reward = run_figures.points(record, "step", "reward/mean", unit_s=scale)
        if reward:
            extra: dict[str, Any] = {"yaxis": "y2", "legendgroup": label(name), "showlegend": not accuracy}
            data.append(line(*downsampling.coarsened(x, smoothed(reward)), name, colour, **extra))
    if not data:
        return None
    x_title = f"wall-clock {unit}" if over_time else "training step"
    return figure(
        data,
        height=420,
        xaxis=axis(x_title, rangemode="tozero", showgrid=False, anchor="y2"),
        yaxis=axis("accuracy", domain=[0.56, 1.0], rangemode="tozero"),
        yaxis2=axis("reward (smoothed)", domain=[0.0, 0.44], anchor="x"),
    )


def lag_histograms(records: Sequence[RunRecord]) -> Figure | None:
    data = []
    for name, colour, record in _coloured(records):
        lags = measures.lag_histogram(record.timeline.steps)
        if total := sum(lags.values()):
            x = list(range(max(lags) + 1))
            drawn = bar(x, [lags.get(a, 0) / total for a in x], name, colour)
            data.append({**drawn, "hovertemplate": "%{y:.1%} of tokens %{x} versions old"})
    if not data:
        return None
    x_axis = axis("token staleness, versions", showgrid=False, dtick=1)
    y_axis = axis("share of trained tokens", tickformat=".0%")
    return figure(data, height=270, xaxis=x_axis, yaxis=y_axis, barmode="group", bargap=0.25)


def head_lag(records: Sequence[RunRecord]) -> Figure | None:
    data = []
    for name, colour, record in _coloured(records):
        steps = [s for s in record.timeline.steps if any(s.lag)]
        heads = [fmean(s.lag.heads) for s in steps]
        if steps:
            data.append(line(*downsampling.coarsened([float(s.step) for s in steps], heads), name, colour))
    if not data:
        return None
    y_axis = axis("versions, mean over groups", rangemode="tozero")
    x_axis = axis("training step", showgrid=False)
    return figure(data, height=270, xaxis=x_axis, yaxis=y_axis, hovermode="x unified")


def time_spent(names: Sequence[str], summaries: Sequence[RunSummary]) -> Figure | None:
    """Draw one bar per run, with its phases stacked."""
    if not any(s.phase_s for s in summaries):
        return None
    data = []
    for phase, colour in PHASE_COLOURS.items():
        x = [s.phase_s.get(phase, 0.0) for s in summaries]
        drawn = bar(x, [label(n) for n in names], phase, colour)
        data.append({**drawn, "orientation": "h", "hovertemplate": "%{x:.1f} s"})
    return figure(
        data,
        height=270,
        barmode="stack",
        bargap=0.45,
        barcornerradius=0,
        legend={**LEGEND, "traceorder": "normal"},
        xaxis=axis("seconds"),
        yaxis=axis(autorange="reversed", showgrid=False),
    )


def trained_lengths(records: Sequence[RunRecord]) -> Figure | None:
    found = {
        name: (measures.trained_lengths(record.timeline.samples), colour) for name, colour, record in _coloured(records)
    }
    longest = max((max(values) for values, _ in found.values() if values), default=0)
    if not longest:
        return None
    data = [
        run_figures.length_curve(values, name, colour, longest) for name, (values, colour) in found.items() if values
    ]
    y_axis = axis("share of samples", tickformat=".0%", rangemode="tozero")
    x_axis = axis("response tokens", showgrid=False, rangemode="tozero")
    return figure(data, height=270, xaxis=x_axis, yaxis=y_axis, hovermode="x unified")
