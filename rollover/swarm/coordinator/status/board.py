"""The board: all that people can see of a swarm, gathered from the coordinator, the publisher and the run.

::

    coordinator ──members, changes──▶ board ──▶ status.json (rollover workers RUN), weights.jsonl
    publisher ──publications───────────▶ │ └───▶ live page, metrics
    run ──metrics of steps───────────────┘

Invariants: it only listens; a run without one trains the same weights. What it remembers has a limit.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollover.swarm.coordinator.status.snapshot import SwarmStatus, write_status
from rollover.swarm.coordinator.status.weight_log import WeightLog
from rollover.swarm.publication.publications import PublishedWeights

MAX_PUBLICATIONS = 20
MAX_POINTS = 300
"""Points of the curve of tokens/s: ten minutes, at one every two seconds."""
MAX_WORKER_POINTS = 40
MAX_CURVES = 200
"""Workers of a swarm up to which each has a curve of its own."""
_DRIFT = "drift/"


class StatusBoard:
    """Completes each state of the swarm by what the others have reported, shows it, and keeps the last minutes in mind.
    Implements ``EngineMetrics``.

    Args:
        folder: where ``status.json`` and ``weights.jsonl`` are written; without it, nothing is.
        run: the run's name for people.
        mode: "pull" or "push_pull".
    """

    def __init__(self, folder: Path | None = None, *, run: str = "", mode: str = "") -> None:
        self.page = ""
        """The address of the live page, once it is open."""
        self.status: SwarmStatus | None = None
        """The status that was written last."""
        self._folder, self._run, self._mode = folder, run, mode
        self._weight_log = WeightLog(folder)
        self.take_metrics, self.changed = self._weight_log.take_metrics, self._weight_log.changed
        self._publications: deque[PublishedWeights] = deque(maxlen=MAX_PUBLICATIONS)
        self._step: int | None = None
        self._metrics: Mapping[str, float] = {}
        self._convergence_s: float | None = None
        self._drift: dict[str, float] = {}
        self._history: deque[tuple[float, float]] = deque(maxlen=MAX_POINTS)
        self._histories: dict[str, deque[float]] = {}

    def published(self, weights: PublishedWeights) -> None:
        """Record a publication that can be fetched from now on."""
        self._weight_log.published(weights)
        self._publications.append(weights)

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a training step; what is no finite number is left out."""
        self._step = step
        self._metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        drift = {name.removeprefix(_DRIFT): value for name, value in self._metrics.items() if name.startswith(_DRIFT)}
        self._drift.update(drift)
        self._convergence_s = self._metrics.get("swarm/convergence_s", self._convergence_s)

    def write(self, status: SwarmStatus) -> None:
        self.status = status = replace(
            status,
            workers=tuple(replace(worker, drift=self._drift.get(worker.name)) for worker in status.workers),
            run=self._run,
            mode=self._mode,
            page=self.page,
            publications=tuple(self._publications),
            step=self._step,
            convergence_s=self._convergence_s,
            metrics=self._metrics,
        )
        self._remember(status)
        if self._folder is not None:
            write_status(self._folder, status)

    def curves(self) -> dict[str, Any]:
        """Return tokens/s over the last minutes, in all and by worker, and the seconds that they span."""
        if not self._history:
            return {}
        points_s, points = zip(*self._history, strict=True)
        histories = {name: tuple(curve) for name, curve in self._histories.items()}
        return {"history": points, "history_s": points_s[-1] - points_s[0], "histories": histories}

    def _remember(self, status: SwarmStatus) -> None:
        self._history.append((time.monotonic(), sum(worker.tokens_per_s for worker in status.workers)))
        if len(status.workers) > MAX_CURVES:
            self._histories = {}
            return
        for worker in status.workers:
            points = self._histories.setdefault(worker.name, deque(maxlen=MAX_WORKER_POINTS))
            points.append(round(worker.tokens_per_s, 1))
