"""The figures of one run's report. Long runs are drawn legibly: stretches of consecutive steps as one point each, and a
band for how far steps spread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, cycle
from statistics import fmean
from typing import Any, TypeVar

from rollover.report import measures, phases
from rollover.report.colours import CURVE_COLOURS, PHASE_COLOURS, WASTE_COLOURS
from rollover.report.health import Curve
from rollover.report.metrics import Kind, accuracies_by_dataset, series, standard_error_of
from rollover.report.plot import LEGEND, Figure, axis, bar, figure, line, smoothed, step_axis, time_unit
from rollover.report.record import RunRecord
from rollover.report.throughput import DECODED, TRAINED, Speed

T = TypeVar("T")

MAX_POINTS = 150
"""Maximum number of points of a curve; the steps of a longer run are drawn in stretches."""
_BAND = 0.1, 0.9
"""Quantiles between which a band lies."""
_MAX_BARS = 120
"""Maximum number of steps drawn individually; longer runs are drawn as means over stretches of steps."""

_MAX_MARKED = 60
"""Maximum number of evaluations marked individually, with their standard errors."""


def origin_s(record: RunRecord) -> float:
    """Return where wall-clock axes start: the first evaluation or rollout. Warm-up lies before it."""
    times = [r.time_s for r in record.metrics if r.kind != "warmup"]
    return min([*times[:1], *([record.timeline.start_s] if record.timeline.samples else [])], default=0.0)


def points(record: RunRecord, kind: Kind, name: str, *, unit_s: float | None = None) -> tuple[list[float], list[float]]:
    """Return (x, y) of a metric over wall-clock in units of ``unit_s`` seconds, or over steps without it."""
    found = series(record.metrics, kind, name)
    if unit_s is None:
        return [float(s) for s, _, _ in found], [v for _, _, v in found]
    start_s = origin_s(record)
    return [(t - start_s) / unit_s for _, t, _ in found], [v for _, _, v in found]


def span_s(record: RunRecord) -> float:
    return max([r.time_s for r in record.metrics] + [record.timeline.end_s]) - origin_s(record)


def learning(record: RunRecord, *, over_time: bool) -> Figure | None:
    """Draw held-out accuracy above and training reward below."""
    unit, seconds = time_unit(span_s(record))
    unit_s = seconds if over_time else None
    x, reward = points(record, "step", "reward/mean", unit_s=unit_s)
    data = _accuracy_traces(record, unit_s)
    both = bool(data) and bool(reward)
    if reward:
        at: dict[str, Any] = {"yaxis": "y2"} if both else {}
        faint = {"line": {"color": "--blue", "width": 1}, "opacity": 0.35, "showlegend": False, "hoverinfo": "skip"}
        spread = band(x, reward, "--blue", **at)
        data += spread or [line(x, reward, "per step", "--blue", **{**at, **faint})]
        data.append(line(*coarsened(x, smoothed(reward)), "reward (smoothed)", "--blue", **at))
    if not data:
        return None
    x_title = f"wall-clock {unit}" if over_time else "training step"
    axes: dict[str, Any] = {"yaxis": axis("accuracy" if not both and not reward else "reward", rangemode="tozero")}
    if both:
        axes = {
            "yaxis": axis("accuracy", domain=[0.56, 1.0], rangemode="tozero"),
            "yaxis2": axis("reward", domain=[0.0, 0.44], anchor="x"),
        }
    x_axis = axis(x_title, rangemode="tozero", showgrid=False, **({"anchor": "y2"} if both else {}))
    return figure(data, height=420 if both else 280, xaxis=x_axis, **axes)


def _accuracy_traces(record: RunRecord, unit_s: float | None) -> list[dict[str, Any]]:
    names = accuracies_by_dataset(record.metrics)
    shown = list(zip(names, cycle(("--green", "--violet", "--orange", "--cyan", "--pink")), strict=False))
    if len(names) != 1:
        shown.insert(0, ("accuracy", "--ink"))
    traces = (_accuracy_trace(record, name, colour, unit_s) for name, colour in shown)
    return [trace for trace in traces if trace is not None]


def _accuracy_trace(record: RunRecord, metric: str, colour: str, unit_s: float | None) -> dict[str, Any] | None:
    x, y = points(record, "eval", metric, unit_s=unit_s)
    if not y:
        return None
    name = f"accuracy, {metric.partition('/')[2] or 'all sets'}"
    if len(y) > _MAX_MARKED:
        return line(*coarsened(x, y), name, colour)
    errors = [v for _, _, v in series(record.metrics, "eval", standard_error_of(metric))]
    bars = {"error_y": {"type": "data", "array": errors, "thickness": 1.2, "width": 4, "color": colour}}
    marks = {"mode": "lines+markers", "marker": {"color": colour, "size": 7}}
    return line(x, y, name, colour, **marks, **(bars if len(errors) == len(y) else {}))


def lag_histogram(record: RunRecord) -> Figure | None:
    lags = measures.lag_histogram(record.timeline.trained_steps)
    total = sum(lags.values())
    if not total:
        return None
    every_lag = list(range(max(lags) + 1))
    shares = bar(every_lag, [lags.get(a, 0) / total for a in every_lag], "trained tokens", "--blue")
    shares |= {
        "customdata": [lags.get(a, 0) for a in every_lag],
        "marker": {"color": ["--blue" if a == 0 else "--orange" for a in every_lag]},
        "hovertemplate": "%{x} versions old<br>%{y:.1%} of trained tokens (%{customdata:,})<extra></extra>",
    }
    x_axis = axis("token staleness, versions", dtick=1 if len(every_lag) <= 16 else None, showgrid=False)
    y_axis = axis("share of trained tokens", tickformat=".0%")
    return figure([shares], height=270, xaxis=x_axis, yaxis=y_axis, bargap=0.25)


def lag_over_steps(record: RunRecord) -> Figure | None:
    steps = [s for s in record.timeline.trained_steps if any(s.lag)]
    if not steps:
        return None
    x = [float(s.step) for s in steps]
    mean = [s.lag.mean for s in steps]
    head = [fmean(s.lag.heads) for s in steps]
    oldest = [float(max(part)) for part in stretches([max(s.lag.heads) for s in steps])]
    starts = [part[0] for part in stretches(x)]
    data = [
        line(starts, oldest, "oldest token", "--soft", line={"color": "--soft", "width": 1.4, "shape": "hv"}),
        *band(x, mean, "--orange"),
        line(*coarsened(x, head), "head lag, mean over groups", "--violet"),
        line(*coarsened(x, mean), "token lag, mean", "--orange"),
    ]
    x_axis = step_axis(len(x), x_title(len(x), what="means, oldest and a band"))
    return figure(data, height=270, xaxis=x_axis, yaxis=axis("versions", rangemode="tozero"), hovermode="x unified")


def lengths(record: RunRecord) -> Figure | None:
    """Draw both histograms as shares of their own samples, over the same bins."""
    generated = measures.generated_lengths(record.timeline.samples)
    trained = measures.trained_lengths(record.timeline.samples)
    if not generated:
        return None
    found = (("generated", generated, "--soft"), ("trained", trained, "--blue"))
    longest, shown = max(generated), [each for each in found if each[1]]
    data = [length_curve(values, f"{name} ({len(values):,})", colour, longest) for name, values, colour in shown]
    data[0]["fill"] = "tozeroy"
    y_axis = axis("share of samples", tickformat=".0%", rangemode="tozero")
    x_axis = axis("response tokens", showgrid=False, rangemode="tozero")
    return figure(data, height=270, xaxis=x_axis, yaxis=y_axis, hovermode="x unified")


def length_curve(values: Sequence[int], name: str, colour: str, longest: int) -> dict[str, Any]:
    """Draw a histogram as a stepped line: the share of ``values`` in some forty bins from 0 to ``longest``."""
    width = max(1, -(-longest // 40))
    starts = range(0, longest + 1, width)
    counts = [0] * len(starts)
    for value in values:
        counts[value // width] += 1
    y = [c / len(values) for c in counts]
    extra = {
        "line": {"color": colour, "width": 2, "shape": "hvh"},
        "customdata": [f"{s}–{s + width - 1}" if width > 1 else str(s) for s in starts],
        "hovertemplate": "%{customdata} tokens: %{y:.1%}",
    }
    return line([s + (width - 1) / 2 for s in starts], y, name, colour, **extra)


def waste_over_time(record: RunRecord) -> Figure | None:
    curves = measures.waste_curves(record.timeline.waste)
    if not curves:
        return None
    start_s, (unit, unit_s) = origin_s(record), time_unit(span_s(record))
    end = (record.timeline.end_s - start_s) / unit_s
    data = []
    for cause, whole in curves.items():
        curve = [part[-1] for part in stretches(whole)]  # a running total is exact at the end of each
        x = [0.0, *((t - start_s) / unit_s for t, _ in curve), end]
        y = [0.0, *(float(n) for _, n in curve), float(curve[-1][1])]
        colour = WASTE_COLOURS[cause]
        shape = {"line": {"color": colour, "width": 2.2, "shape": "hv"}}
        data.append(line(x, y, cause.value.replace("_", " "), colour, showlegend=True, **shape))
    y_axis = axis("tokens wasted so far", rangemode="tozero")
    return figure(data, height=270, xaxis=axis(f"wall-clock {unit}", showgrid=False), yaxis=y_axis)


def time_split(record: RunRecord) -> Figure | None:
    spent = list(phases.by_step(record.metrics, record.timeline).items())
    if not spent:
        return None
    parts = stretches(spent, _MAX_BARS)
    data = []
    for phase in phases.PHASES:
        seconds = [fmean([of_step[phase] for _, of_step in part]) for part in parts]
        stack = bar([part[0][0] for part in parts], seconds, phase, PHASE_COLOURS[phase])
        data.append({**stack, "hovertemplate": "%{y:.2f} s"})
    stacked: dict[str, Any] = {"barmode": "stack", "bargap": 0.15, "barcornerradius": 0, "hovermode": "x unified"}
    x_axis, legend = step_axis(len(spent), x_title(len(spent), _MAX_BARS)), {**LEGEND, "traceorder": "normal"}
    return figure(data, height=270, xaxis=x_axis, yaxis=axis("seconds per step"), legend=legend, **stacked)


def throughput(record: RunRecord) -> Figure | None:
    """Draw tokens over seconds of a tenth of the run around each step: the steps of one round differ by their place."""
    data = []
    for speed, name, colour in (
        (DECODED, "decoded, of rollout time", "--blue"),
        (TRAINED, "trained, of the whole loop", "--orange"),
    ):
        x, y = _moving(record, speed)
        data += [line(*coarsened(x, y), name, colour)] if y else []
    if not data:
        return None
    y_axis = axis("tokens/s, moving mean", rangemode="tozero")
    x_axis = step_axis(max(len(d["x"]) for d in data))
    return figure(data, height=270, xaxis=x_axis, yaxis=y_axis, hovermode="x unified")


def _moving(record: RunRecord, speed: Speed) -> tuple[list[float], list[float]]:
    """Return (steps, speeds), each speed taken over the steps around it, fewer at the ends."""
    rows = [r for r in record.metrics if r.kind == "step"]
    found = [(float(r.step), parts) for r in rows if (parts := speed.parts(r.values)) is not None]
    tokens, seconds = ([0.0, *accumulate(parts[i] for _, parts in found)] for i in (0, 1))
    half, last = max(2, len(found) // 20), len(found)
    around = [(max(0, i - half), min(last, i + half + 1)) for i in range(last)]
    spent = [(x, tokens[b] - tokens[a], seconds[b] - seconds[a]) for (x, _), (a, b) in zip(found, around, strict=True)]
    return [x for x, _, s in spent if s > 0], [n / s for _, n, s in spent if s > 0]


def small(record: RunRecord, curves: Sequence[Curve]) -> Figure | None:
    """Draw some curves over steps, small; curves that are not measured are left out. Among several, so are curves
    that are 0 throughout."""
    rows = [row for row in record.metrics if row.kind == "step"]
    found = []
    for curve in curves:
        points = [(float(row.step), y) for row in rows if math.isfinite(y := curve.value(row.values))]
        if points and (len(curves) == 1 or any(y for _, y in points)):
            found.append((curve.name, [x for x, _ in points], [y for _, y in points]))
    return _small(found, named=len(curves) > 1)


def by_name(record: RunRecord, prefix: str) -> Figure | None:
    """Draw the metrics ``prefix`` + name over steps, a smoothed curve for each name."""
    metrics = {name: None for row in record.metrics if row.kind == "step" for name in row.values}
    found = [(name.removeprefix(prefix), *points(record, "step", name)) for name in metrics if name.startswith(prefix)]
    return _small([(name, x, smoothed(y)) for name, x, y in found if y], height=270)


def lengths_by_reward(record: RunRecord) -> Figure | None:
    """Draw the mean length of the responses above and below the mean reward of their batch."""
    found = measures.lengths_by_reward(record.timeline.samples)
    steps = [step for step, _ in found]
    names = ("above the mean reward", "below the mean reward")
    return _small([(name, steps, [pair[i] for _, pair in found]) for i, name in enumerate(names)]) if found else None


def _small(
    curves: Sequence[tuple[str, Sequence[float], Sequence[float]]], *, height: int = 180, named: bool = True
) -> Figure | None:
    """Draw curves (name, x, y); a single one with the band of its steps. ``named``: whether their names are shown."""
    if not curves:
        return None
    data = band(*curves[0][1:], "--blue") if len(curves) == 1 else []
    for (name, x, y), colour in zip(curves, cycle(CURVE_COLOURS), strict=False):
        data.append(line(*coarsened(x, y), name, colour, line={"color": colour, "width": 1.6}))
    margin, y_axis = {"l": 40, "r": 8, "t": 30 if named else 8, "b": 28}, axis(nticks=4, exponentformat="e")
    x_axis = step_axis(1, "") if len(curves[0][1]) == 1 else axis(showgrid=False, nticks=5)
    shown: dict[str, Any] = {"margin": margin, "showlegend": named, "hovermode": "x unified"}
    return figure(data, height=height, xaxis=x_axis, yaxis=y_axis, **shown)


def stretches(steps: Sequence[T], most: int = MAX_POINTS) -> list[Sequence[T]]:
    """Cut ``steps`` into at most ``most`` parts of equal length; the last one may be shorter."""
    size = max(1, -(-len(steps) // most))
    return [steps[i : i + size] for i in range(0, len(steps), size)]


def x_title(num_steps: int, most: int = MAX_POINTS, what: str = "means") -> str:
    """Return the title of an axis of training steps, with a word on what its points stand for."""
    size = max(1, -(-num_steps // most))
    return "training step" if size == 1 else f"training step ({what} over {size})"


def band(x: Sequence[float], y: Sequence[float], colour: str, **extra: Any) -> list[dict[str, Any]]:
    """Draw the area in which most of the steps of each stretch lie; draw nothing where every step has a point of its
    own."""
    if len(y) <= MAX_POINTS:
        return []
    parts = [sorted(part) for part in stretches(y)]
    middle = [_rounded_mean(part) for part in stretches(x)]
    low, high = ([part[round(q * (len(part) - 1))] for part in parts] for q in _BAND)
    area = {
        "type": "scatter",
        "mode": "lines",
        "x": [*middle, *reversed(middle)],
        "y": [*high, *reversed(low)],
        "fill": "toself",
        "fillcolor": colour,
        "line": {"width": 0, "color": colour},
        "opacity": 0.18,
        "hoverinfo": "skip",
        "showlegend": False,
    }
    return [{**area, **extra}]


def coarsened(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the curve through the means of its stretches, or the curve itself if it is short."""
    if len(y) <= MAX_POINTS:
        return list(x), list(y)
    return [_rounded_mean(part) for part in stretches(x)], [_rounded_mean(part) for part in stretches(y)]


def _rounded_mean(values: Sequence[float]) -> float:
    """Return the mean to six digits: what a rounding error adds to a constant would otherwise be drawn as a curve."""
    return float(f"{fmean(values):.6g}")
