"""Plotly figures as plain dictionaries: axes, lines, bars.

Colours are names of the page's CSS variables (``rollover.report.colours``). Text that comes from data is HTML-escaped,
because Plotly reads markup in labels.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

Figure = dict[str, Any]
"""``{"data": [...], "layout": {...}}``"""

LEGEND = {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "font": {"size": 11.5}}
_POINT = {"mode": "markers", "cliponaxis": False}
_MAX_NUMBERED = 12


def axis(title: str = "", **extra: Any) -> dict[str, Any]:
    named = {"title": {"text": title, "standoff": 8, "font": {"size": 12, "color": "--muted"}}}
    return {
        **(named if title else {}),
        "gridcolor": "--grid",
        "linecolor": "--line",
        "zeroline": False,
        "automargin": True,
        "tickfont": {"size": 11, "color": "--muted"},
        **extra,
    }


def figure(data: Sequence[Mapping[str, Any]], *, height: int, **layout: Any) -> Figure:
    text = {"size": 12, "color": "--ink"}
    base = {
        "height": height,
        "margin": {"l": 48, "r": 14, "t": 30, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 12, "color": "--ink"},
        "hoverlabel": {"bgcolor": "--surface", "bordercolor": "--line", "align": "left", "font": text},
        "legend": LEGEND,
        "barcornerradius": 2,
    }
    return {"data": list(data), "layout": {**base, **layout}}


def line(x: Sequence[float], y: Sequence[float], name: str, colour: str, **extra: Any) -> dict[str, Any]:
    """Draw a curve; if it has a single point, mark it, since a line through one point is not seen."""
    return {
        "type": "scatter",
        "mode": "lines",
        **(_POINT | {"marker": {"color": colour, "size": 8}} if len(x) == 1 else {}),
        "x": list(x),
        "y": list(y),
        "name": label(name),
        "line": {"color": colour, "width": 2.2},
        **extra,
    }


def step_axis(num_steps: int, title: str = "training step") -> dict[str, Any]:
    """Return an axis of training steps. Few steps are numbered one by one: there is nothing between two of them."""
    return axis(title, showgrid=False, **({"dtick": 1} if num_steps <= _MAX_NUMBERED else {}))


def bar(x: Sequence[float], y: Sequence[Any], name: str, colour: str) -> dict[str, Any]:
    marker = {"color": colour, "line": {"width": 0}}
    return {"type": "bar", "x": list(x), "y": list(y), "name": label(name), "marker": marker}


def label(text: str) -> str:
    """Escape text from outside so that Plotly may show it."""
    return html.escape(text)


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the centred moving mean over a tenth of the run, at least five steps, narrower towards the ends. Being
    symmetric everywhere it leaves a straight line alone: it neither lags behind a rise nor lifts the start."""
    half = max(2, len(values) // 20)
    halves = (min(half, i, len(values) - 1 - i) for i in range(len(values)))
    return [sum(values[i - h : i + h + 1]) / (2 * h + 1) for i, h in enumerate(halves)]


def time_unit(span_s: float) -> tuple[str, float]:
    """Return (name, seconds) of the unit in which a wall-clock axis of this length reads best."""
    if span_s < 300:
        return "seconds", 1.0
    return ("minutes", 60.0) if span_s < 3 * 3600 else ("hours", 3600.0)
