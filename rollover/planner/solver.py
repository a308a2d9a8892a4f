"""Linear and mixed-integer programmes, handed to HiGHS by way of scipy."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_array

from rollover.planner.rate_load import Floats

_INFEASIBLE = 2


class OutOfTime(Exception):
    """The solver stopped with neither a point nor a proof that there is none."""


class ConstraintRows:
    """The rows of a programme, collected one by one."""

    def __init__(self, num_variables: int) -> None:
        self.num_variables = num_variables
        self._where: list[npt.NDArray[np.int64]] = []
        self._values: list[Floats] = []
        self._limits: list[tuple[float, float]] = []

    def add(self, where: npt.ArrayLike, values: npt.ArrayLike, *, low: float = -np.inf, high: float = np.inf) -> None:
        """Add the row ``low <= values @ variables[where] <= high``."""
        places = np.asarray(where, dtype=np.int64)
        factors = np.broadcast_to(np.asarray(values, dtype=np.float64), places.shape)
        self._where.append(places[factors != 0])
        self._values.append(factors[factors != 0])
        self._limits.append((low, high))

    def copy(self) -> ConstraintRows:
        other = ConstraintRows(self.num_variables)
        other._where, other._values, other._limits = list(self._where), list(self._values), list(self._limits)
        return other

    def constraint(self) -> LinearConstraint:
        ends = np.cumsum([0, *(len(where) for where in self._where)])
        parts = np.concatenate(self._values), np.concatenate(self._where), ends
        low, high = np.array(self._limits).T
        return LinearConstraint(csr_array(parts, shape=(len(self._limits), self.num_variables)), low, high)


def minimum(
    objective: Floats,
    rows: LinearConstraint,
    bottom: Floats,
    top: Floats,
    *,
    whole: npt.NDArray[np.int64] | None = None,
    gap: float = 0.0,
    time_limit_s: float | None = None,
) -> OptimizeResult | None:
    """Return the best point, or ``None`` where there is none; raises ``OutOfTime`` before either is known."""
    options: Any = {"mip_rel_gap": gap}
    if time_limit_s is not None:
        options["time_limit"] = max(time_limit_s, 0.05)
    with _hushed():
        found = milp(objective, integrality=whole, bounds=Bounds(bottom, top), constraints=rows, options=options)
    if found.x is None:
        if found.status != _INFEASIBLE:
            raise OutOfTime(found.message)
        return None
    return found


@contextmanager
def _hushed() -> Iterator[None]:
    """Hide the remarks that the solver's library prints to the process's standard output, past Python."""
    sys.stdout.flush()
    kept, sink = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(sink)
