"""Long runs drawn legibly: stretches of consecutive steps as one point each, and a band for how far steps spread."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, TypeVar

MAX_POINTS = 150
"""Maximum number of points of a curve; the steps of a longer run are drawn in stretches."""
_LOW, _HIGH = 0.1, 0.9
"""Quantiles between which a band lies."""

T = TypeVar("T")


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
    middle = [_mean(part) for part in stretches(x)]
    low, high = ([part[round(q * (len(part) - 1))] for part in parts] for q in (_LOW, _HIGH))
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
    return [_mean(part) for part in stretches(x)], [_mean(part) for part in stretches(y)]


def _mean(values: Sequence[float]) -> float:
    """Return the mean to six digits: what a rounding error adds to a constant would otherwise be drawn as a curve."""
    return float(f"{fmean(values):.6g}")
