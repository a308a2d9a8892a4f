"""Figures of a study, as the report's are made."""

from __future__ import annotations

from typing import Any

from rollover.frontier.settings import knob_of, label, name_of, place_of, value_of
from rollover.frontier.study import Study
from rollover.frontier.sweep import FrontierPoint
from rollover.report.measures import clip_curve
from rollover.report.plot import Figure, axis, figure, line
from rollover.report.plot import label as escaped

_COLOURS = ("--blue", "--orange", "--green", "--violet", "--red", "--cyan", "--pink", "--brown", "--yellow", "--soft")
_CURVE_POINTS = 60
_MIN_SEEDS = 3
"""Minimum number of seeds for which an interval is drawn: an interval of two seeds says only that two are too few."""


def colours(study: Study) -> dict[str, str]:
    """Return the colour of each strategy; synchronous rollout is grey."""
    others = [s for s in study.strategies if s != "sync"]
    return {"sync": "--muted", **{s: _COLOURS[i % len(_COLOURS)] for i, s in enumerate(others)}}


def frontier(study: Study) -> Figure:
    """Draw gain against lag: one line per strategy, the ceiling of all schedules, the closed form, and the marked
    points."""
    data: list[dict[str, Any]] = []
    for strategy, colour in colours(study).items():
        points = sorted(study.of(strategy), key=lambda p: p.lag)
        margins = [p.gain.margin or 0.0 for p in points] if study.num_seeds >= _MIN_SEEDS else []
        data.append(
            {
                **line([p.lag for p in points], [p.gain.mean for p in points], strategy, colour),
                "mode": "lines+markers",
                "cliponaxis": False,  # sync has a lag of 0
                "marker": {"size": 8, "color": colour},
                "error_y": {"type": "data", "array": margins, "thickness": 1.2, "width": 3, "color": colour},
                "customdata": [escaped(label(p.config)) for p in points],
                "hovertemplate": "%{customdata}: %{y:.2f}× at lag %{x:.2f}<extra></extra>",
            }
        )
    longest = max([p.lag for p in study.points] + [1.0])
    data += _closed_form(study, longest)
    data.append(_mark(study.current, "in use" if study.setup.is_in_use else "usual setting", "square-open"))
    chosen = dict.fromkeys(study.points.index(advice.chosen) for advice in study.advice)
    for place, index in enumerate(chosen):
        data.append({**_mark(study.points[index], "recommended", "star"), "showlegend": place == 0})
    ceiling = study.setup.ceiling / study.sync.mean("tokens_per_s")
    tallest = max(p.gain.mean for p in study.points)
    if ceiling < 2.5 * tallest:
        dashed = {"color": "--soft", "width": 1.6, "dash": "dash"}
        data.append(line([0, 1.04 * longest], [ceiling, ceiling], f"ceiling {ceiling:.2f}×", "--soft", line=dashed))
    return figure(
        data,
        height=460,
        xaxis=axis(f"{study.setup.lag_of} lag, in versions", rangemode="tozero"),
        yaxis=axis("throughput over synchronous rollout", rangemode="tozero", ticksuffix="×"),
        hovermode="closest",
    )


def _mark(point: FrontierPoint, name: str, symbol: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "cliponaxis": False,
        "x": [point.lag],
        "y": [point.gain.mean],
        "name": name,
        "marker": {"size": 18, "symbol": symbol, "color": "--ink", "line": {"width": 2, "color": "--ink"}},
        "hovertemplate": f"{escaped(name)}: {escaped(label(point.config))}<extra></extra>",
    }


def _closed_form(study: Study, longest: float) -> list[dict[str, Any]]:
    """Draw the closed form ``lag K = kappa``, or nothing where it does not hold: where the trainer or rewards take
    time, or there is more than one replica."""
    scenario = study.setup.scenario
    if not (scenario.trainer.is_zero and scenario.reward.is_zero and len(scenario.replicas) == 1) or longest <= 1:
        return []
    lags = [1 + (longest - 1) * i / _CURVE_POINTS for i in range(_CURVE_POINTS + 1)]
    gains = [study.theory.gain_at_lag(lag) for lag in lags]
    return [
        line(lags, gains, "closed form, caches kept", "--soft", line={"color": "--soft", "width": 1.4, "dash": "dot"})
    ]


def sensitivity(study: Study) -> list[tuple[str, Figure]]:
    """Return (title, figure) of gain against over-sampling and concurrency, group size, cap and B0."""
    drawn = []
    for key, title, x_title in (
        ("over_sampling_batch_size", "Over-sampling r", "groups in flight over groups of a batch"),
        ("num_running", "Concurrency C", "samples in flight over samples of a batch"),
        ("max_staleness", "Staleness bound S", "versions"),
        ("lag_target", "Lag target", "versions requested"),
    ):
        strategies = [s for s in study.strategies if (knob := knob_of(s)) is not None and knob.key == key]
        if strategies:
            drawn.append((title, _by_knob(study, strategies, x_title)))
    for what, title, x_title in (
        ("group size", "Group size", "samples per prompt"),
        ("cap", "Cap", "longest response, tokens"),
        ("B0", "B0", "samples at which an iteration takes twice as long"),
    ):
        if any(v.what == what for v in study.variations):
            drawn.append((title, _by_variation(study, what, x_title)))
    return drawn


def _by_knob(study: Study, strategies: list[str], x_title: str) -> Figure:
    palette = colours(study)
    curves = []
    for strategy in strategies:
        points = [(value_of(p.config) or 0.0, p) for p in study.of(strategy)]
        curves += _gain_and_lag(strategy, palette[strategy], points)
    return _two_axes(curves, x_title)


def _by_variation(study: Study, what: str, x_title: str) -> Figure:
    here = {
        "group size": study.setup.rollout.group_size,
        "cap": study.setup.cap_tokens,
        "B0": sum(r.b0 for r in study.setup.scenario.replicas),
    }[what]
    palette = colours(study)
    shown = {p.config: p for p in (study.current, study.advice[-1].chosen) if p.config.strategy.kind != "sync"}
    curves = []
    for config, point in shown.items():
        found = [(float(here), point)]
        for variation in study.variations:
            other = variation.point.config
            if variation.what == what and place_of(other) == place_of(config):
                found.append((variation.value, variation.point))
        found.sort(key=lambda pair: pair[0])
        curves += _gain_and_lag(label(config), palette[name_of(config)], found)
    return _two_axes(curves, x_title)


def _gain_and_lag(name: str, colour: str, points: list[tuple[float, FrontierPoint]]) -> list[dict[str, Any]]:
    """Draw gain as a solid line, and lag as a dotted one on its own axis."""
    x = [v for v, _ in points]
    gain = line(x, [p.gain.mean for _, p in points], name, colour, mode="lines+markers", marker={"size": 6})
    lag = line(x, [p.lag for _, p in points], f"{name}, lag", colour, yaxis="y2", showlegend=False)
    lag["line"] = {"color": colour, "width": 1.5, "dash": "dot"}
    return [{**gain, "hovertemplate": "%{y:.2f}×"}, {**lag, "hovertemplate": "lag %{y:.2f}"}]


def _two_axes(data: list[dict[str, Any]], x_title: str) -> Figure:
    own = {"overlaying": "y", "side": "right", "tickmode": "auto", "nticks": 5}
    right = axis("lag, versions", showgrid=False, rangemode="tozero", **own)
    return figure(
        data,
        height=290,
        margin={"l": 48, "r": 48, "t": 30, "b": 40},
        xaxis=axis(x_title, showgrid=False),
        yaxis=axis("gain", rangemode="tozero", ticksuffix="×", nticks=5),
        yaxis2=right,
        hovermode="x unified",
    )


def active(study: Study) -> Figure:
    """Draw the samples that are decoding over the same number of steps, each setting from its own zero."""
    palette = ("--muted", "--orange", "--blue")
    data = []
    for picture, colour in zip(study.pictures, palette, strict=False):
        start_s = picture.window.start_s
        curve = clip_curve(picture.timeline.active, start_s, picture.window.end_s)
        x, y = [t - start_s for t, _ in curve], [float(n) for _, n in curve]
        shape = {"line": {"color": colour, "width": 2, "shape": "hv"}}
        data.append({**line(x, y, label(picture.config), colour, **shape), "hovertemplate": "%{y}"})
    unit = time_title(study)
    return figure(
        data,
        height=300,
        xaxis=axis(unit, showgrid=False),
        yaxis=axis("samples decoding", rangemode="tozero"),
        hovermode="x unified",
    )


def time_title(study: Study) -> str:
    return "seconds" if study.setup.unit == "s" else "time in c0 (iterations over an empty batch)"
