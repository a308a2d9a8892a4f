"""The linear programme of phase 1, in rates.

"The larger of two times" with whole numbers of replicas multiplies variables; with lambda = training steps per second
everything is linear but the loss to weight updates, lambda times replicas. That loss is charged at a guessed rate:
a ``Program`` is the problem at one guess, and ``rollover.planner.milp`` finds the guess that comes true.

Variables are scaled to order 1: time in cycles of the fastest training plan, sample rates in batches. Per column c,
bucket w (share a, share of longest m) and training plan p with cycle D:

    x[c,w] >= 0   batches' worth of bucket w per cycle      y[c]  replicas, whole
    b[p]   >= 0   part of the time the trainer is busy      z[p]  0 or 1
    lambda = sum b[p] / D[p]

    (1) sum_c x[c,w] >= lambda                                    every bucket is produced
    (2) sum_w x[c,w] a B / (r rho) <= y[c]                        replica time; rho = 1 - guess * update
    (3) sum z = 1; b[p] <= z[p]                                   one trainer
    (4) sum devices y + devices z <= stock                        each type
    (5) the same times price <= budget
    (6) sum m ell x + sum b <= max_staleness + 1                  Little's law: what is admitted and not consumed
    (7) sum_w held x[c,w] <= room y[c]                            caches, where they are held without decoding
    (8) lambda ell_max + sum b <= max_staleness + 1  or  x[c,w] = 0       tail, optional

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
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from rollover.planner.records import Problem

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]

USABLE = 1e-3
"""Replicas that weight updates leave less of their time are not used."""
_INFEASIBLE = 2
_EXACT = 1e-9


class OutOfTime(Exception):
    """The solver stopped with neither a point nor a proof that there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Values of the variables, in the programme's scale."""

    x: Floats
    """(columns, buckets)"""
    busy: Floats
    """(plans,)"""
    y: Floats
    """(columns,), whole unless caps are shared"""
    z: Floats
    """(plans,), whole"""
    used: Floats
    """(columns * buckets,): 1 where the tail allows the column; empty without a tail."""
    extra: Floats
    """(types,): devices beyond the stock."""
    objective: float
    bound: float
    """What the objective cannot be better than."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """Limits taken away, or turned into prices, to find out which of them stands in the way."""

    stock: bool = False
    """Devices beyond the stock may be used: ``extra``."""
    budget: bool = False
    staleness: bool = False
    """The bound is a variable."""


class Program:
    """The rows of ``problem`` with weight updates charged at ``rate`` steps/s."""

    def __init__(self, problem: Problem, rate: float, relaxed: Relaxation | None = None) -> None:
        self.problem = problem
        self.rate = rate
        self.relaxed = relaxed or Relaxation()
        self.unit_s = min(plan.cycle_s for plan in problem.plans)
        self.shape = len(problem.columns), len(problem.workload.buckets)
        self._read_columns(rate)
        self._read_plans()
        self._lay_out()
        self._collect()

    # --- Data -----------------------------------------------------------------------------------------------------

    def _read_columns(self, rate: float) -> None:
        problem, workload = self.problem, self.problem.workload
        columns = problem.columns
        away_s = workload.reward_s + workload.held_s
        rho = 1 - rate * np.array([c.updates_s for c in columns])
        self.usable = rho > USABLE
        rho = np.where(self.usable, rho, 1.0)

        def stretched(latencies: Sequence[tuple[float, ...]]) -> Floats:
            return ((np.array(latencies) - away_s) / rho + away_s) / self.unit_s

        alone = problem.max_staleness == 0 and not self.relaxed.staleness
        self.longest = np.array([b.batch_share if alone else b.group_share for b in workload.buckets])
        self.ell = stretched([c.batch_latencies_s if alone else c.group_latencies_s for c in columns])
        self.ell_max = stretched([c.max_latencies_s for c in columns])
        per_cycle = np.array([b.share for b in workload.buckets]) * workload.batch_size / self.unit_s
        self.replica_time = per_cycle / (np.array([c.rates for c in columns]) * rho)
        running_s = np.array([c.latencies_s for c in columns]) - away_s
        held = np.array([c.kv_byte_s for c in columns]) / np.array([[c.kv_bytes] for c in columns])
        self.cache_time = per_cycle * held * (running_s / rho + workload.held_s) / (running_s + workload.held_s)
        self.sizes = np.array([c.num_devices for c in columns], dtype=np.float64)
        kinds: dict[tuple[str, int, int], list[int]] = {}
        for index, column in enumerate(columns):
            kinds.setdefault((column.device, column.tp, column.pp), []).append(index)
        self.shapes = [sorted(members, key=lambda i: columns[i].batch_cap) for members in kinds.values()]

    def _read_plans(self) -> None:
        problem = self.problem
        self.speeds = np.array([self.unit_s / plan.cycle_s for plan in problem.plans])
        self.training = np.array(
            [[plan.count(supply.device) for supply in problem.supplies] for plan in problem.plans], dtype=np.float64
        )
        self.kinds = np.array(
            [[column.device == supply.device for column in problem.columns] for supply in problem.supplies]
        )
        stock = np.array([s.count for s in problem.supplies], dtype=np.float64)
        self.stock = np.full_like(stock, np.inf) if self.relaxed.stock else stock
        self.prices = np.array([np.nan if s.price_per_hour is None else s.price_per_hour for s in problem.supplies])

    @property
    def nothing(self) -> Floats:
        """No objective: any point will do."""
        return np.zeros(self.num_variables)

    @property
    def costs(self) -> Floats:
        """What a device of each type counts: its price, or 1 where some price is unknown."""
        return np.ones_like(self.prices) if np.isnan(self.prices).any() else self.prices

    # --- Variables ------------------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        """Where each variable stands, and its bounds."""
        problem = self.problem
        num_columns, num_buckets = self.shape
        num_plans, num_types = len(problem.plans), len(problem.supplies)
        tailed = problem.tail != "none"
        sizes = {
            "x": num_columns * num_buckets,
            "busy": num_plans,
            "y": num_columns,
            "z": num_plans,
            "used": num_columns * num_buckets * tailed,
            "kinds": num_columns,
            "shapes": len(self.shapes),
            "extra": num_types,
            "staleness": 1,
        }
        self.at: dict[str, npt.NDArray[np.int64]] = {}
        end = 0
        for name, size in sizes.items():
            self.at[name] = np.arange(end, end + size)
            end += size
        self.num_variables = end
        top = np.full(end, np.inf)
        top[self.at["x"]] = np.where(self.usable, np.inf, 0.0).ravel()
        for name in ("busy", "z", "used"):
            top[self.at[name]] = 1
        top[self.at["y"]] = self._most_replicas()
        top[self.at["extra"]] = np.inf if self.relaxed.stock else 0
        top[self.at["kinds"]] = 0  # until they are counted
        self.top, self.bottom = top, np.zeros(end)
        if not self.relaxed.staleness:
            self.top[self.at["staleness"]] = self.bottom[self.at["staleness"]] = problem.max_staleness
        self.whole = np.zeros(end, dtype=np.int64)
        for name in ("y", "z", "used", "kinds", "shapes", "extra", "staleness"):
            self.whole[self.at[name]] = 1

    def _most_replicas(self) -> Floats:
        """Of each column: what the stock holds, and no more than produce all samples alone."""
        stock = self.kinds.T @ np.nan_to_num(self.stock, posinf=1e9)
        fit = np.floor(stock / self.sizes)
        ever = np.ceil((self.replica_time * self.usable).sum(axis=1) * float(self.speeds.max()))
        held = np.ceil((self.cache_time * self.usable).sum(axis=1) * float(self.speeds.max()))
        return np.minimum(fit, np.maximum(ever, held))

    # --- Rows -----------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        self._blocks: list[tuple[Places, Floats, Floats]] = []
        at, problem = self.at, self.problem
        x, y = at["x"].reshape(self.shape), at["y"][:, None]
        buckets, plans = self.shape[1], len(at["z"])
        made = np.ones((buckets, self.shape[0])), np.tile(-self.speeds, (buckets, 1))
        self._add(np.hstack([x.T, np.tile(at["busy"], (buckets, 1))]), np.hstack(made), low=0)  # (1)
        self._add(np.hstack([x, y]), np.hstack([self.replica_time, -np.ones(y.shape)]), high=0)  # (2)
        self._add(at["z"], np.ones(plans), low=1, high=1)  # (3)
        self._add(np.stack([at["busy"], at["z"]], axis=1), np.tile([1.0, -1.0], (plans, 1)), high=0)
        self._add_stock()
        if problem.budget_per_hour is not None and not self.relaxed.budget:  # (5)
            spent = self.cost_row(self.prices)
            self._add(np.flatnonzero(spent), spent[np.flatnonzero(spent)] / problem.budget_per_hour, high=1)
        away = (self.longest * self.ell).ravel()  # (6)
        self._add(np.r_[at["x"], at["busy"], at["staleness"]], np.r_[away, np.ones(plans), -1.0], high=1)
        if problem.workload.held_s:  # (7); otherwise it follows from (2)
            self._add(np.hstack([x, y]), np.hstack([self.cache_time, -np.ones(y.shape)]), high=0)
        if problem.tail != "none":
            self._add_tail()
        for shape, members in zip(at["shapes"], self.shapes, strict=True):  # replicas by shape, whatever their cap
            self._add(np.r_[at["y"][members], shape], np.r_[np.ones(len(members)), -1.0], low=0, high=0)

    def _add_stock(self) -> None:
        """(4), and the limits of each role."""
        at = self.at
        for g, supply in enumerate(self.problem.supplies):
            rolling, training = self.sizes * self.kinds[g], self.training[:, g]
            self._add(np.r_[at["y"], at["z"], at["extra"][g]], np.r_[rolling, training, -1.0], high=supply.count)
            if supply.max_rollout is not None:
                self._add(at["y"], rolling, high=supply.max_rollout)
            if supply.max_training is not None:
                self._add(at["z"], training, high=supply.max_training)

    def _add_tail(self) -> None:
        """(8), with the least constants that make a row void."""
        at = self.at
        limit = self.problem.max_staleness + (self.problem.tail == "soft")
        fastest = float(self.speeds.max())
        for ell, used, x in zip(self.ell_max.ravel(), at["used"], at["x"], strict=True):
            late = ell * self.speeds + 1
            void = max(0.0, float(late.max()) - limit)
            self._add(np.r_[at["busy"], used], np.r_[late, void], high=limit + void)
            self._add(np.array([x, used]), np.array([1.0, -fastest]), high=0)

    def _add(self, where: Places, values: Floats, *, low: float = -np.inf, high: float = np.inf) -> None:
        """A row, or a block of rows with the same limits."""
        where, values = np.atleast_2d(where), np.atleast_2d(values)
        self._blocks.append((where, values, np.tile([low, high], (len(where), 1))))
        self._matrix: LinearConstraint | None = None

    def cost_row(self, prices: Floats) -> Floats:
        """Cost per hour as a function of all variables."""
        row = np.zeros(self.num_variables)
        row[self.at["y"]] = self.sizes * (self.kinds.T @ prices)
        row[self.at["z"]] = self.training @ prices
        return row

    def rate_row(self) -> Floats:
        """lambda as a function of all variables."""
        row = np.zeros(self.num_variables)
        row[self.at["busy"]] = self.speeds
        return row

    def staleness_row(self) -> Floats:
        """The left side of (6)."""
        row = np.zeros(self.num_variables)
        row[self.at["x"]] = (self.longest * self.ell).ravel()
        row[self.at["busy"]] = 1
        return row

    def unit_row(self, name: str) -> Floats:
        """The sum of one kind of variable."""
        row = np.zeros(self.num_variables)
        row[self.at[name]] = 1
        return row

    # --- Solving --------------------------------------------------------------------------------------------------

    def demand(self, rate: float) -> None:
        """At least ``rate`` steps/s."""
        row = self.rate_row()
        where = np.flatnonzero(row)
        self._add(where, row[where], low=rate * self.unit_s)

    def limit(self, row: Floats, high: float) -> None:
        """One more row."""
        where = np.flatnonzero(row)
        scale = max(abs(high), 1e-9)
        self._add(where, row[where] / scale, high=high / scale)

    def count_kinds(self) -> None:
        """``kinds`` are 1 for the columns in use."""
        self.top[self.at["kinds"]] = 1
        for c, y in enumerate(self.at["y"]):
            if self.top[y] > 0:
                self._add(np.array([y, self.at["kinds"][c]]), np.array([1.0, -self.top[y]]), high=0)

    def allow(self, plans: Sequence[int]) -> None:
        """Only these training plans."""
        self.top[self.at["z"]] = 0
        self.top[self.at["z"][list(plans)]] = 1

    def share_caps(self) -> None:
        """A shape's replicas may divide their time between batch caps: whole numbers are then few, and the optimum,
        which is found at once, is a bound close to the true one."""
        self.whole[self.at["y"]] = 0

    def round_caps(self, point: Point) -> None:
        """As many replicas of each shape as in ``point``, where they share caps; each with one of the caps it used or
        a neighbour of them."""
        self.whole[self.at["y"]] = 1
        for shape, members in zip(self.at["shapes"], self.shapes, strict=True):
            used = np.flatnonzero(point.y[members] > _EXACT)
            near = {members[i] for at in used for i in (at - 1, at, at + 1) if 0 <= i < len(members)}
            self.top[self.at["y"][[i for i in members if i not in near]]] = 0
            self.bottom[shape] = self.top[shape] = np.round(point.y[members].sum())

    def fix(self, point: Point) -> None:
        """Replicas and trainer as they are in ``point``."""
        for name, values in (("y", point.y), ("z", point.z), ("used", point.used)):
            self.bottom[self.at[name]] = self.top[self.at[name]] = values

    def relaxed_rate(self, plans: Sequence[int]) -> float:
        """What these plans cannot exceed, steps/s: the optimum without whole numbers; 0 where there is none."""
        self.allow(plans)
        point = self.minimise(-self.rate_row(), whole=False)
        return 0.0 if point is None else -point.objective / self.unit_s

    def minimise(
        self, objective: Floats, *, gap: float = 0.0, time_limit_s: float | None = None, whole: bool = True
    ) -> Point | None:
        """The best point, or ``None`` where there is none; raises ``OutOfTime`` before either is known."""
        if self._matrix is None:
            self._matrix = self._constraints()
        options: Any = {"mip_rel_gap": gap}
        if time_limit_s is not None:
            options["time_limit"] = max(time_limit_s, 0.05)
        with _hushed():
            found = milp(
                objective,
                integrality=self.whole if whole else np.zeros_like(self.whole),
                bounds=Bounds(self.bottom, self.top),
                constraints=self._matrix,
                options=options,
            )
        if found.x is None:
            if found.status != _INFEASIBLE:
                raise OutOfTime(found.message)
            return None
        bound = found.mip_dual_bound if whole and found.mip_dual_bound is not None else found.fun
        return self._point(found.x, float(found.fun), float(bound))

    def copy(self) -> Program:
        """The same rows, with bounds of its own."""
        other = copy(self)
        other.top, other.bottom, other.whole = self.top.copy(), self.bottom.copy(), self.whole.copy()
        other._blocks = list(self._blocks)
        return other

    def _constraints(self) -> LinearConstraint:
        sizes = np.concatenate([np.full(len(where), where.shape[1]) for where, _, _ in self._blocks])
        index = np.repeat(np.arange(len(sizes)), sizes)
        where = np.concatenate([where.ravel() for where, _, _ in self._blocks])
        values = np.concatenate([values.ravel() for _, values, _ in self._blocks])
        matrix = coo_array((values, (index, where)), shape=(len(sizes), self.num_variables)).tocsr()
        matrix.eliminate_zeros()
        low, high = np.concatenate([limits for _, _, limits in self._blocks]).T
        return LinearConstraint(matrix, low, high)

    def _point(self, values: Floats, objective: float, bound: float) -> Point:
        at = self.at
        return Point(
            x=np.maximum(values[at["x"]], 0).reshape(self.shape),
            busy=np.maximum(values[at["busy"]], 0),
            y=np.round(values[at["y"]]) if self.whole[at["y"]].all() else np.maximum(values[at["y"]], 0),
            z=np.round(values[at["z"]]),
            used=np.round(values[at["used"]]),
            extra=np.round(values[at["extra"]]),
            objective=objective,
            bound=bound,
        )


@contextmanager
def _hushed() -> Iterator[None]:
    """The solver's library prints remarks of its own to the process's standard output, past Python."""
    sys.stdout.flush()
    kept, sink = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(sink)
