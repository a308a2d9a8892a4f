"""Figures of a study, as the report's are made."""

from __future__ import annotations

from typing import Any

from rollover.frontier.settings import label
from rollover.frontier.study import Study
from rollover.frontier.sweep import FrontierPoint
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
    ceiling = study.ceiling / study.sync.mean("tokens_per_s")
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
    time, responses have turns, there is more than one replica, or the lag is not a mean over tokens."""
    scenario = study.setup.scenario
    if (
        scenario.turns is not None
        or study.setup.lag_of not in ("batch", "token")
        or not (scenario.trainer.is_zero and scenario.reward.is_zero and len(scenario.replicas) == 1)
        or longest <= 1
    ):
        return []
    lags = [1 + (longest - 1) * i / _CURVE_POINTS for i in range(_CURVE_POINTS + 1)]
    gains = [study.theory.gain_at_lag(lag) for lag in lags]
    return [
        line(lags, gains, "closed form, caches kept", "--soft", line={"color": "--soft", "width": 1.4, "dash": "dot"})
    ]
