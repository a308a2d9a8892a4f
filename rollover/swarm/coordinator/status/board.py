"""The board: all that people can see of a swarm, gathered from the coordinator, the publisher and the run.

::

    coordinator ──members──▶ board ──▶ status.json (rollover workers RUN)
    publisher ──publication──▶ │ └───▶ live page, metrics
    run ──step's metrics───────┘

Invariants: it only listens; a run without one trains the same weights. What it remembers has a limit.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollover.swarm.coordinator.status.snapshot import StatusFile, SwarmStatus, WorkerStatus
from rollover.swarm.publication.publications import PublishedWeights

MAX_PUBLICATIONS = 20
MAX_POINTS = 300
"""Points of the curve of tokens/s: ten minutes, at one every two seconds."""
MAX_WORKER_POINTS = 40
MAX_CURVES = 200
"""Workers of a swarm up to which each has a curve of its own."""
_DRIFT = "drift/"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardView:
    """The content of the live page: the state now, and tokens/s over the last minutes, all together and by worker.

    Example: ``BoardView(status=status, history=(0.0, 812.5), history_s=2.0, histories={"laptop": (0.0, 812.5)})``
    """

    status: SwarmStatus
    history: tuple[float, ...]
    history_s: float
    """Time from the first point to the last."""
    histories: Mapping[str, tuple[float, ...]]


class StatusBoard:
    """Completes each state of the swarm by what the others have said, shows it, and keeps the last minutes in mind.

    Args:
        file: where ``rollover workers`` reads the state.
        run: the run's name for people.
        mode: "pull" or "push_pull".
        now_s: seconds since 1970.

    Example: ``board.step_ended(3, {"staleness/max": 1.0})``, then ``board.write(status)``: the file says both.
    """

    def __init__(self, file: StatusFile, *, run: str, mode: str) -> None:
        self.page = ""
        """The address of the live page, once it is open."""
        self.view: BoardView | None = None
        """The view that was written last."""
        self._file, self._run, self._mode = file, run, mode
        self._publications: deque[PublishedWeights] = deque(maxlen=MAX_PUBLICATIONS)
        self._step: int | None = None
        self._metrics: Mapping[str, float] = {}
        self._convergence_s: float | None = None
        self._drift: dict[str, float] = {}
        self._history: deque[tuple[float, float]] = deque(maxlen=MAX_POINTS)
        self._histories: dict[str, deque[float]] = {}

    def published(self, weights: PublishedWeights) -> None:
        """Record a publication."""
        self._publications.append(weights)

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a training step; what is no finite number is left out."""
        self._step = step
        self._metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        drift = {name.removeprefix(_DRIFT): value for name, value in self._metrics.items() if name.startswith(_DRIFT)}
        self._drift.update(drift)
        self._convergence_s = self._metrics.get("swarm/convergence_s", self._convergence_s)

    def write(self, status: SwarmStatus) -> None:
        """Show a new state."""
        workers = tuple(self._completed(worker) for worker in status.workers)
        status = replace(
            status,
            workers=workers,
            run=self._run,
            mode=self._mode,
            page=self.page,
            publications=tuple(self._publications),
            step=self._step,
            convergence_s=self._convergence_s,
            metrics=self._metrics,
        )
        self._remember(status)
        histories = {name: tuple(points) for name, points in self._histories.items()}
        points_s, points = zip(*self._history, strict=True)
        self.view = BoardView(status=status, history=points, history_s=points_s[-1] - points_s[0], histories=histories)
        self._file.write(status)

    def _completed(self, worker: WorkerStatus) -> WorkerStatus:
        return replace(worker, drift=self._drift.get(worker.name))

    def _remember(self, status: SwarmStatus) -> None:
        self._history.append((time.monotonic(), sum(worker.tokens_per_s for worker in status.workers)))
        if len(status.workers) > MAX_CURVES:
            self._histories = {}
            return
        for worker in status.workers:
            points = self._histories.setdefault(worker.name, deque(maxlen=MAX_WORKER_POINTS))
            points.append(round(worker.tokens_per_s, 1))
