"""Collects the drift of each engine over batches until there are enough tokens to judge it.

A batch of an asynchronous run has few tokens that the newest weights sampled: with three workers and ``max_staleness``
3, about twenty per worker. Judged batch by batch, an engine would hardly ever have enough.

Invariants: an engine is judged over at least ``MIN_TOKENS`` tokens, of which fewer than ``MIN_TOKENS`` are from
earlier batches than the newest; each token is judged once. So an engine that begins to lie is found by the end of the
second window that it fills, and its earlier tokens cannot hide its present ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollover.batch import Drift

MIN_TOKENS = 64
"""The fewest tokens of an engine that are meaningful: in half precision, single tokens can be far off."""


class DriftWindows:
    """One window for each engine, by name.

    Args:
        tolerance: mean distance of log-probs, in nats, that rounding explains.

    Example: after ``add({"laptop": Drift(40, 0.2)})``, which returns ``{}``, ``add({"laptop": Drift(24, 0.1)})``
    returns ``{"laptop": Drift(64, 0.1625)}`` if that is beyond the tolerance, and the window of the laptop is empty
    again.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._open: dict[str, Drift] = {}

    def add(self, drift: Mapping[str, Drift]) -> dict[str, Drift]:
        """Add the drift of one batch. Returns, by engine, the windows that it fills and whose mean is beyond the
        tolerance. A full window starts again."""
        too_far: dict[str, Drift] = {}
        for name, found in drift.items():
            window = _together(self._open.pop(name, None), found)
            if window.num_tokens < MIN_TOKENS:
                self._open[name] = window
            elif not window.mean_abs <= self._tolerance:  # a mean that is not a number is beyond it too
                too_far[name] = window
        return too_far

    def forget(self, name: str) -> None:
        """Start the window of an engine again, since none of the tokens that it has sampled so far will be trained."""
        self._open.pop(name, None)


def _together(first: Drift | None, second: Drift) -> Drift:
    if first is None or not second.num_tokens:
        return first or second
    num_tokens = first.num_tokens + second.num_tokens
    total = first.num_tokens * first.mean_abs + second.num_tokens * second.mean_abs
    return Drift(num_tokens, total / num_tokens)
