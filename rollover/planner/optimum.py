"""Phase 1: the fastest plan of a problem, or the cheapest that is fast enough, proved to a gap.

At a given rate everything is linear (``RateDemand``), and what can be done at a rate can be done at any lower one. So
the search climbs: it asks for a point that is better than the best so far by the gap, and is done when there is none.

Trainers are asked one by one, the most promising first. Shadow prices (``PriceBounds``) bound what each can reach, and
rule out most trainers and most kinds of replica before any whole number is looked for.

Later passes keep the rate within the gap and choose among ties: least cost, then fewest kinds of replica, then the
least staleness. Equal problems give equal plans, bit for bit, whatever the order and names of types.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from rollover.errors import PlanError
from rollover.planner.milp import OutOfTime, Program, ProgramPoint
from rollover.planner.rate_demand import Floats, RateDemand
from rollover.planner.records import Problem, Solution, Supply
from rollover.planner.shadow_prices import PriceBounds
from rollover.planner.solution import described, highest, rate_reached

GAP = 1e-3
"""Proved relative distance to the optimum."""
TIME_LIMIT_S = 60.0
_PROOF_S = 2.0
"""Time limit for the proof that a plan does not exist."""
_ROUGH = 1e-2
"""Gap for solves whose result is only a starting point or a choice among ties."""
_PROOF = 0.75
"""Fraction of the gap that the search proves; the rest is for the choice among ties."""
_KINDS_GAP = 0.2
"""Number of kinds of replica allowed beyond the minimum."""
_EXACT = 1e-9
_FIRST = 0.92
"""Fraction of the rate of the linear relaxation at which the search starts."""
_STEPS = 10
"""Number of gaps left to climb when halving ends."""
_SLOWEST = 1e-6
"""Fraction of that rate at which the search for any point gives up."""


def solve(
    problem: Problem, *, gap: float = GAP, time_limit_s: float = TIME_LIMIT_S, simplify: bool = True
) -> Solution | None:
    """Find the optimum; ``None`` if nothing satisfies the problem. Raises ``PlanError`` when time is up before there is
    any. ``simplify`` runs the later passes; without it the first optimum found is the answer."""
    began = time.perf_counter()
    ordered, places = canonical(problem)
    search = _Search(ordered, gap, began + time_limit_s)
    target = problem.target_steps_per_s
    try:
        found = search.fastest() if target is None else search.cheapest(target)
    except OutOfTime:
        raise PlanError(f"no plan was found in {time_limit_s:g} s, but one may exist: allow more time") from None
    if found is None:
        return None
    if simplify:
        found = search.simplified(found)
    solution = described(search.problem, found.point.y, found.point.plan, found.rate, bound=found.bound, gap=found.gap)
    return replace(
        solution,
        replicas=tuple(solution.replicas[i] for i in places),
        rates=tuple(solution.rates[i] for i in places),
        solve_s=time.perf_counter() - began,
    )


def may_reach(problem: Problem, steps_per_s: float, cost_per_hour: float | None = None) -> bool:
    """Return False if it is proved that no plan reaches a rate, for no more than a cost if one is given."""
    search = _Search(canonical(problem)[0], GAP, time.perf_counter() + _PROOF_S)
    try:
        if cost_per_hour is None:
            return search._beyond(steps_per_s) is not None
        return search._below(RateDemand(search.problem, steps_per_s), cost_per_hour, exact=True) is not None
    except OutOfTime:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Whole numbers and the rate they reach."""

    point: ProgramPoint
    rate: float
    bound: float = math.inf
    gap: float = math.inf


class _Search:
    """One problem's passes under one deadline."""

    def __init__(self, problem: Problem, gap: float, deadline: float) -> None:
        self.problem = problem
        self.gap = _PROOF * gap
        self.spare = (1 - _PROOF) * gap
        """Fraction of the rate that the later passes may give up."""
        self.deadline = deadline
        self.missed = [math.inf] * len(problem.plans)
        """Lowest rate known to be out of each plan's reach."""

    def left_s(self) -> float:
        return self.deadline - time.perf_counter()

    # --- Aim A ----------------------------------------------------------------------------------------------------

    def fastest(self) -> _Found | None:
        """Find the greatest rate."""
        top = 1 / min(plan.cycle_s for plan in self.problem.plans)
        hoped = highest(self._promised, top, known=0.0, accuracy=_ROUGH)
        best = self._first(hoped) if hoped else None
        if best is None:
            return None
        bound = min(top, self._ceiling(hoped))
        try:
            best = self._nearer(best, bound)
            while self.left_s() > 0:
                better = self._beyond(best.rate * (1 + self.gap))
                if better is None:
                    bound = best.rate * (1 + self.gap)
                    break
                best = better
        except OutOfTime:
            pass
        return replace(best, bound=bound, gap=max(0.0, bound / best.rate - 1))

    def _nearer(self, best: _Found, high: float) -> _Found:
        """Return a point close to the highest rate below ``high``, found by halving the interval and asking only the
        most promising trainer: climbing takes small steps."""
        while high > best.rate * (1 + _STEPS * self.gap):
            middle = (best.rate + high) / 2
            better = self._beyond(middle, exact=False, most=1)
            if better is None:
                high = middle
            else:
                best = better
        return best

    def _first(self, hoped: float) -> _Found | None:
        """Find a good point by rounding at ever lower rates; return ``None`` where there is none at any rate."""
        part = _FIRST
        while part > _SLOWEST:
            best = self._beyond(part * hoped, exact=False)
            if best is not None:
                return best
            part *= part
        return self._beyond(_SLOWEST * hoped)

    def _promised(self, rate: float) -> float:
        """Return how much more than ``rate`` could be done if numbers need not be whole; below zero where it cannot."""
        demand = RateDemand(self.problem, rate)
        able = demand.able()
        return PriceBounds(demand).promise(able) if able else -1.0

    def _ceiling(self, rate: float) -> float:
        """Return a rate that no plan exceeds, judged by the prices at ``rate``."""
        demand = RateDemand(self.problem, rate)
        return rate * (1 + max(0.0, PriceBounds(demand).promise(demand.able())))

    def _beyond(self, rate: float, *, exact: bool = True, most: int | None = None) -> _Found | None:
        """Return a point that reaches ``rate`` or more. ``None`` means that there is provably none or, if not
        ``exact``, that rounding found none among the ``most`` most promising trainers.

        Where caps are shared the answer is quick. What that leaves open is asked without an objective, which is several
        times faster than to look for the best."""
        left = []
        for plan, program in islice(self._promising(RateDemand(self.problem, rate)), most):
            shared = program.copy()
            objective = shared.open_share()
            shared.share_caps()
            point = shared.minimise(objective, gap=_ROUGH, time_limit_s=self.left_s())
            if point is None:
                self.missed[plan] = rate
                continue
            shared.round_caps(point)
            found = self._reached(shared.minimise(objective, gap=_ROUGH, time_limit_s=self.left_s()), rate)
            if found is not None:
                return found
            if exact:
                left.append((plan, program))
        for plan, program in left:
            program.limit(-program.unit_row("y"), -1.0)  # one replica: at a low rate a millionth passes for enough
            found = self._reached(program.minimise(None, time_limit_s=self.left_s()), rate)
            if found is not None:
                return found
            self.missed[plan] = rate
        return None

    def _reached(self, point: ProgramPoint | None, rate: float) -> _Found | None:
        """Return the point with the rate that it reaches. ``None`` also stands for a point without replicas: at a low
        rate the solver takes a millionth of a replica for none."""
        if point is None or not point.y.any():
            return None
        reached = rate_reached(self.problem, point.y, point.plan, known=rate, accuracy=self.gap / 10)
        return _Found(point=point, rate=reached or rate)

    def _promising(self, demand: RateDemand, cost: float | None = None) -> Iterator[tuple[int, Program]]:
        """Yield each plan that may carry ``demand`` (at no more than ``cost``, if one is given), the most promising
        first, with a programme without the replicas that the plan cannot bear."""
        real, total, bounds = cost is not None, cost or 0.0, PriceBounds(demand)
        able = [p for p in demand.able() if demand.rate < self.missed[p]]
        room = np.full(len(self.missed), -np.inf)
        if able:
            room[able] = bounds.room(bounds.prices(able, real=real), total)[able]
        most: dict[int, Floats] = {}
        while room.max() >= -_EXACT:
            best = int(np.argmax(room))
            if best in most:
                yield best, Program(demand, [best], most=most[best])
                room[best] = -np.inf
            else:
                prices = bounds.prices([best], real=real)
                room = np.minimum(room, bounds.room(prices, total))
                most[best] = bounds.most(prices, best, max(0.0, float(room[best])))

    # --- Aim B and the passes after it ----------------------------------------------------------------------------

    def cheapest(self, target: float) -> _Found | None:
        """Find the least cost of ``target`` steps/s."""
        missing = [s.device for s in self.problem.supplies if s.price_per_hour is None]
        if missing:
            raise PlanError(f"the least cost needs a price: write price_per_hour for {', '.join(missing)}")
        demand = RateDemand(self.problem, target)
        point, least = None, float(demand.stock @ demand.costs)
        while (cheaper := self._below(demand, least, exact=True)) is not None:
            point, least = cheaper, cheaper.objective * (1 - self.gap)
        if point is None:
            return None
        rate = max(target, rate_reached(self.problem, point.y, point.plan, known=target) or target)
        return _Found(point=point, rate=rate, bound=rate, gap=self.gap)

    def simplified(self, found: _Found) -> _Found:
        """Choose the least cost at (almost) the rate found, then the fewest kinds of replica at that cost."""
        target = self.problem.target_steps_per_s
        floor = found.rate * (1 - self.spare) if target is None else target
        demand, point = RateDemand(self.problem, floor), found.point
        try:
            if target is None:
                least = demand.cost(point.y, point.plan)
                while (cheaper := self._below(demand, least * (1 - self.gap), exact=False)) is not None:
                    point, least = cheaper, cheaper.objective
            point = self._fewest_kinds(demand, point)
        except OutOfTime:
            pass
        rate = rate_reached(self.problem, point.y, point.plan, known=floor)
        if rate is None or rate < floor * (1 - 1e-6):
            return found
        if target is not None:
            return replace(found, point=point, rate=max(rate, target), bound=max(rate, target))
        bound = max(found.bound, rate)
        return replace(found, point=point, rate=rate, bound=bound, gap=bound / rate - 1)

    def _below(self, demand: RateDemand, cost: float, *, exact: bool) -> ProgramPoint | None:
        """Return a point that carries ``demand`` and costs no more than ``cost``; its objective is its cost. If not
        ``exact``, return only one that rounding finds."""
        for _, program in self._promising(demand, cost):
            costs = program.cost_row(demand.costs)
            program.limit(costs, cost)
            shared = program.copy()
            shared.share_caps()
            point = shared.minimise(costs, gap=_ROUGH, time_limit_s=self.left_s())
            if point is None:
                continue
            shared.round_caps(point)
            point = shared.minimise(costs, gap=_ROUGH, time_limit_s=self.left_s())
            if point is None and exact:
                point = program.minimise(costs, gap=self.gap, time_limit_s=self.left_s())
            if point is not None:
                return point
        return None

    def _fewest_kinds(self, demand: RateDemand, point: ProgramPoint) -> ProgramPoint:
        """Return a point at the same cost with the fewest of the kinds of replica that are in use: with the same
        trainer or, where that saves more kinds, with any other."""
        best, cost = point, demand.cost(point.y, point.plan) * (1 + 1e-6)
        listed = [plan for plan in demand.able() if demand.rate < self.missed[plan]]
        for plans in ([point.plan], listed):
            if np.count_nonzero(best.y) < 2 or not plans:
                break
            program = Program(demand, plans, most=np.where(point.y, np.inf, 0.0))
            program.limit(program.cost_row(demand.costs), cost)
            fewer = program.minimise(program.count_kinds(), gap=_KINDS_GAP, time_limit_s=self.left_s())
            if fewer is not None and np.count_nonzero(fewer.y) < np.count_nonzero(best.y):
                best = fewer
        return best


def canonical(problem: Problem) -> tuple[Problem, tuple[int, ...]]:
    """Sort a problem by what things are, never by what they are called; return with it the new place of each kind of
    replica."""

    def signature(index: int) -> tuple[Any, ...]:
        c = problem.replica_kinds[index]
        return (c.num_devices, c.batch_cap, c.tp, c.rate, c.group_latency_s, c.update_s, c.kv_bytes, c.kv_byte_s)

    members: dict[str, list[int]] = {supply.device: [] for supply in problem.supplies}
    for index in sorted(range(len(problem.replica_kinds)), key=signature):
        members[problem.replica_kinds[index].device].append(index)

    def signature_of_supply(supply: Supply) -> tuple[Any, ...]:
        price = -1.0 if supply.price_per_hour is None else supply.price_per_hour
        plans = sorted((p.cycle_s, p.count(supply.device)) for p in problem.plans if p.count(supply.device))
        return (supply.count, supply.node_sizes, price, [signature(i) for i in members[supply.device]], plans)

    supplies = sorted(problem.supplies, key=signature_of_supply)
    kinds = [index for supply in supplies for index in members[supply.device]]
    plans = sorted(problem.plans, key=lambda p: (p.cycle_s, p.step_s, [p.count(s.device) for s in supplies]))
    ordered = replace(
        problem,
        supplies=tuple(supplies),
        replica_kinds=tuple(problem.replica_kinds[i] for i in kinds),
        plans=tuple(plans),
    )
    places = {index: place for place, index in enumerate(kinds)}
    return ordered, tuple(places[i] for i in range(len(kinds)))
