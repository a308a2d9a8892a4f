"""Compares the weights that a run has evaluated, by ``eval.metric``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from rollover.report.metrics import MetricRow
from rollover.trainer.checkpoint import checkpoint_path


class Scores:
    """The values of one metric in the evaluations of a run so far."""

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
        return self._best_of(self._values)

    def best_kept(self, checkpoints: Path) -> int | None:
        """Return the best version, apart from versions whose checkpoint is not in the folder ``checkpoints``: they were
        deleted before ``eval.keep_best`` or ``eval.metric`` was set. Version 0 is the model that the run began with."""
        return self._best_of(v for v in self._values if not v or checkpoint_path(checkpoints, v).is_dir())

    def _best_of(self, versions: Iterable[int]) -> int | None:
        return max(versions, key=lambda version: (self._values[version], -version), default=None)

    @property
    def num_since_best(self) -> int:
        """Return how many evaluations have come after the best."""
        return sum(version > self.best for version in self._values) if self.best is not None else 0
