"""The mixed-integer linear programme (MILP) of phase 1, at one rate.

A problem at a rate (``RateDemand``) asks: is there a trainer, and are there replicas, that do all of the work? Per
kind of replica c and training plan p:

    x[c] >= 0     part of the samples that the kind decodes
    y[c]          replicas, whole
    z[p]          0 or 1
    share         of the samples that are decoded: 1, or as much as can be

    (1) sum x >= share                                             all samples are produced
    (2) time[c] x[c] <= y[c]                                       replica time, less what weight updates take
    (3) sum z = 1                                                  one trainer, fast enough
    (4) sum devices y + devices z <= stock                         each type, each role; also for what is in blocks of
                                                                   a size or larger, and nodes have in whole blocks
    (5) the same times price <= budget
    (6) sum waiting x + busy z <= max_staleness + 1                Little's law: what is admitted and not consumed
    (7) cache[c] x[c] <= y[c]                                      caches, where they are held without decoding
    (8) x[c] = 0 where the longest response would be late          tail, optional

Row (6): at most (max_staleness + 1) batches lie between admission and the end of the step that consumes them. A group
is in flight as long as its longest sample, and a batch without staleness as long as the longest of all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_array

from rollover.planner.rate_demand import Floats, RateDemand

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


_EXACT = 1e-9
_NEAR = 2
"""Number of batch caps above and below one in use that rounding tries too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPoint:
    """Values of the variables, over all kinds and plans of the problem."""

    x: Floats
    """(C,)"""
    y: Floats
    """(C,), whole unless caps are shared"""
    plan: int
    objective: float


class Program:
    """The rows of ``demand`` for one of ``plans``, with at most ``most`` replicas of each kind; without row (6) if the
    bound is ``unbounded``."""

    def __init__(
        self, demand: RateDemand, plans: Sequence[int], *, most: Floats | None = None, unbounded: bool = False
    ) -> None:
        self.demand = demand
        self.problem = demand.problem
        self.plans = list(plans)
        self._choose(most)
        self._lay_out()
        self._add_samples()
        self._add_trainer()
        self._add_limits(unbounded=unbounded)

    # --- Variables ------------------------------------------------------------------------------------------------

    def _choose(self, most: Floats | None) -> None:
        """Choose the kinds that are worth a variable, and the largest number of replicas of each."""
        demand = self.demand
        left = (demand.stock - demand.training[self.plans]).max(axis=0)
        fit = np.floor(demand.of_type.T @ left / demand.sizes)
        self._most = np.where(demand.in_time(self.plans), fit if most is None else np.minimum(fit, most), 0.0)
        self.kinds = np.flatnonzero(self._most)
        self._place = np.full(len(self._most), -1)
        self._place[self.kinds] = np.arange(len(self.kinds))

    def _lay_out(self) -> None:
        """Decide where each variable stands, and its bounds."""
        demand = self.demand
        self.shapes = [kept for s in demand.shapes if len(kept := [c for c in s if self._most[c]])]
        sizes = {
            "x": len(self.kinds),
            "y": len(self.kinds),
            "z": len(self.plans),
            "shapes": len(self.shapes),
            "used": len(self.kinds),
            "share": 1,
        }
        self.at: dict[str, npt.NDArray[np.int64]] = {}
        end = 0
        for name, size in sizes.items():
            self.at[name] = np.arange(end, end + size)
            end += size
        self.num_variables = end
        self.rows = ConstraintRows(end)
        self.bottom, self.top = np.zeros(end), np.full(end, np.inf)
        self.top[self.at["x"]] = 1
        self.top[self.at["y"]] = self._most[self.kinds]
        self.top[self.at["z"]] = 1
        self.top[self.at["used"]] = 0  # until they are counted
        self.bottom[self.at["share"]] = self.top[self.at["share"]] = 1
        self.whole = np.ones(end, dtype=np.int64)
        self.whole[self.at["x"]] = self.whole[self.at["share"]] = 0

    # --- Rows -----------------------------------------------------------------------------------------------------

    def _add_samples(self) -> None:
        """Add rows (1), (2) and (7)."""
        demand, at = self.demand, self.at
        self.rows.add(np.r_[at["x"], at["share"]], np.r_[np.ones(len(at["x"])), -1.0], low=0)
        needs = [demand.time, demand.cache] if self.problem.workload.held_s else [demand.time]  # else (2) implies (7)
        for c, x, y in zip(self.kinds, at["x"], at["y"], strict=True):
            for need in needs:
                self.rows.add([x, y], [need[c], -1.0], high=0)
        for members, shape in zip(self.shapes, at["shapes"], strict=True):  # replicas by shape, whatever their cap
            self.rows.add(
                np.r_[at["y"][self._place[members]], shape], np.r_[np.ones(len(members)), -1.0], low=0, high=0
            )

    def _add_trainer(self) -> None:
        """Add row (3), and rows (8) where they depend on the trainer."""
        demand, at = self.demand, self.at
        self.rows.add(at["z"], 1.0, low=1, high=1)
        quick = np.stack([demand.in_time([p])[self.kinds] for p in self.plans])
        for x, suits in zip(at["x"], quick.T, strict=True):
            if not suits.all():
                self.rows.add(np.r_[x, at["z"][suits]], np.r_[1.0, -np.ones(suits.sum())], high=0)

    def _add_limits(self, *, unbounded: bool) -> None:
        """Add rows (4), (5) and (6)."""
        demand, at, problem = self.demand, self.at, self.problem
        for g, supply in enumerate(problem.supplies):
            rolling = (demand.sizes * demand.of_type[g])[self.kinds]
            training = demand.training[self.plans, g]
            self.rows.add(np.r_[at["y"], at["z"]], np.r_[rolling, training], high=supply.count)
        for (g, size, count), rolling in zip(demand.scarce, demand.in_blocks, strict=True):
            trained = demand.training_in_blocks(g, size, self.plans)
            self.rows.add(np.r_[at["y"], at["z"]], np.r_[rolling[self.kinds], trained], high=count)
        if problem.budget_per_hour is not None:
            self.limit(self.cost_row(np.nan_to_num(demand.prices)), problem.budget_per_hour)
        if not unbounded:
            self.rows.add(np.arange(self.num_variables), self.staleness_row(), high=problem.max_staleness + 1)

    def cost_row(self, prices: Floats) -> Floats:
        """Return the cost per hour as a function of all variables."""
        demand, row = self.demand, np.zeros(self.num_variables)
        row[self.at["y"]] = (demand.sizes * (demand.of_type.T @ prices))[self.kinds]
        row[self.at["z"]] = demand.training[self.plans] @ prices
        return row

    def staleness_row(self) -> Floats:
        """Return the left side of (6)."""
        row = np.zeros(self.num_variables)
        row[self.at["x"]] = self.demand.waiting[self.kinds]
        row[self.at["z"]] = self.demand.busy[self.plans]
        return row

    def unit_row(self, name: str) -> Floats:
        """Return the sum of one kind of variable."""
        row = np.zeros(self.num_variables)
        row[self.at[name]] = 1
        return row

    # --- Questions ------------------------------------------------------------------------------------------------

    def limit(self, row: Floats, high: float) -> None:
        """Add the row ``row @ variables <= high``."""
        scale = max(abs(high), _EXACT)
        self.rows.add(np.arange(self.num_variables), row / scale, high=high / scale)

    def open_share(self, least: float = 1.0) -> Floats:
        """Let more samples be decoded than there are, or fewer, down to ``least``. Return the objective that decodes as
        many as possible."""
        self.bottom[self.at["share"]] = least
        self.top[self.at["share"]] = self.top[self.at["x"]] = np.inf
        return -self.unit_row("share")

    def count_kinds(self) -> Floats:
        """Return the objective that counts the kinds in use, and add the rows that it needs."""
        self.top[self.at["used"]] = 1
        for y, used in zip(self.at["y"], self.at["used"], strict=True):
            self.rows.add(np.array([y, used]), np.array([1.0, -self.top[y]]), high=0)
        return self.unit_row("used")

    def share_caps(self) -> None:
        """Let the replicas of a shape divide their time between batch caps: only whole numbers of shapes are then
        required, and the optimum, which is found at once, is a bound close to the true one."""
        self.whole[self.at["y"]] = 0

    def round_caps(self, point: ProgramPoint) -> None:
        """Keep as many replicas of each shape as in ``point``, where they share caps; each with one of the caps it
        used or one near them."""
        self.whole[self.at["y"]] = 1
        for members, shape in zip(self.shapes, self.at["shapes"], strict=True):
            used = np.flatnonzero(point.y[members] > _EXACT)
            near = {members[i] for at in used for i in range(at - _NEAR, at + _NEAR + 1) if 0 <= i < len(members)}
            self.top[self.at["y"][self._place[[c for c in members if c not in near]]]] = 0
            self.bottom[shape] = self.top[shape] = np.round(point.y[members].sum())

    def fix(self) -> None:
        """Fix the number of replicas of each kind at the most that there may be."""
        self.bottom[self.at["y"]] = self.top[self.at["y"]]
        self.whole[:] = 0

    def copy(self) -> Program:
        """Return a programme with the same rows, whose bounds can be changed without changing these."""
        other = copy(self)
        other.top, other.bottom, other.whole = self.top.copy(), self.bottom.copy(), self.whole.copy()
        other.rows = self.rows.copy()
        return other

    def minimise(
        self, objective: Floats | None, *, gap: float = 0.0, time_limit_s: float | None = None
    ) -> ProgramPoint | None:
        """Return the best point, or any point without an ``objective``; ``None`` where there is none. Raises
        ``OutOfTime`` before either is known."""
        found = minimum(
            np.zeros(self.num_variables) if objective is None else objective,
            self.rows.constraint(),
            self.bottom,
            self.top,
            whole=self.whole,
            gap=gap,
            time_limit_s=time_limit_s,
        )
        if found is None:
            return None
        values = found.x
        x, y = np.zeros(len(self._most)), np.zeros(len(self._most))
        x[self.kinds] = np.maximum(values[self.at["x"]], 0)
        replicas = values[self.at["y"]]
        y[self.kinds] = np.round(replicas) if self.whole[self.at["y"]].all() else np.maximum(replicas, 0)
        return ProgramPoint(
            x=x,
            y=y,
            plan=self.plans[int(np.argmax(values[self.at["z"]]))],
            objective=float(found.fun),
        )
