"""Compares the weights that a run has evaluated, by ``eval.metric``."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rollover.report.metrics import MetricRow


class Scores:
    """The values of one metric in the evaluations of a run so far.

    Example: after ``add(0, 0.3)``, ``add(20, 0.5)`` and ``add(40, 0.5)``, ``best`` is 20 and ``num_since_best`` is 1.
    """

    def __init__(self, metric: str, rows: Iterable[MetricRow]) -> None:
        self.metric = metric
        self._values: dict[int, float] = {}
        for row in rows:
            if row.kind == "eval" and metric in row.values:
                self.add(row.step, row.values[metric])

    def add(self, version: int, value: float) -> None:
        """Record the value for the weights of ``version``, which are newer than all so far."""
        if math.isfinite(value):
            self._values[version] = value

    @property
    def best(self) -> int | None:
        """Return the oldest of the best versions; ``None`` before the first evaluation."""
        return max(self._values, key=lambda version: (self._values[version], -version), default=None)

    @property
    def num_since_best(self) -> int:
        """Return how many evaluations have come after the best."""
        return sum(version > self.best for version in self._values) if self.best is not None else 0
