"""Phase 1: the fastest plan of a problem, or the cheapest that is fast enough, proved to a gap.

Weight updates cost replicas time in proportion to the rate that is being looked for. Let T(l) be the optimum with
updates charged at rate l. T falls continuously in l, so the true optimum is the one rate with T(l) = l, and a rate l
can be beaten only if T(l) > l. ``_Search`` climbs: it lets the rate of the replicas and the trainer so far come true,
asks for a point that is better by the gap with updates charged at that better rate, and is done when there is none.

Training plans that cannot reach the rate asked for are left out before each solve: a handful of linear programmes over
ever smaller sets of plans find them, and what remains is mostly a choice of replicas for one or two trainers.

Later passes keep the rate within the gap and choose among ties: least cost, then fewest kinds of
replica, then the least staleness. Equal problems give equal plans, bit for bit, whatever the order and names of types.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollover.errors import PlanError
from rollover.planner.program import Floats, OutOfTime, Point, Program
from rollover.planner.records import Binding, Problem, Solution, Supply

GAP = 2e-3
"""Proved distance to the optimum, relative."""
TOLERANCE = 1e-3
"""Part of the rate that a lower staleness bound may cost and still be called enough."""
TIME_LIMIT_S = 60.0
_ROUGH = 1e-2
"""Gap of solves whose result is only a start, or a choice among ties."""
_EXACT = 1e-9
_TIGHT = 2e-3
"""Relative slack below which a limit binds: a little over what the passes give away."""


def solve(
    problem: Problem, *, gap: float = GAP, time_limit_s: float = TIME_LIMIT_S, simplify: bool = True
) -> Solution | None:
    """The optimum, or ``None`` where nothing satisfies the problem (``explain`` says why). Raises ``PlanError`` when
    time is up before there is any.

    ``simplify`` runs the later passes; without it the first optimum found is the answer.
    """
    began = time.perf_counter()
    order = _canonical(problem)
    search = _Search(order.problem, gap, began + time_limit_s)
    target = problem.target_steps_per_s
    try:
        found = search.fastest() if target is None else search.cheapest(target)
    except OutOfTime:
        raise PlanError(f"no plan was found in {time_limit_s:g} s, nor was it shown that there is none") from None
    if found is None:
        return None
    if simplify:
        found = search.simplified(found)
    solution = _solution(order.problem, found, search)
    return replace(order.restored(solution), solve_s=time.perf_counter() - began)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Whole numbers and the rate they reach."""

    point: Point
    rate: float
    bound: float
    gap: float


class _Search:
    """One problem's passes under one deadline."""

    def __init__(self, problem: Problem, gap: float, deadline: float) -> None:
        self.problem = problem
        self.gap = gap / 2  # one half for the proof, one for what the later passes give up
        self.deadline = deadline
        self.unit_s = min(plan.cycle_s for plan in problem.plans)
        self.missed = [math.inf] * len(problem.plans)
        """Lowest rate known to be out of each plan's reach."""

    def left_s(self) -> float:
        return self.deadline - time.perf_counter()

    # --- Aim A ----------------------------------------------------------------------------------------------------

    def fastest(self) -> _Found | None:
        """The greatest rate."""
        everyone = range(len(self.problem.plans))
        hoped = self._come_true(lambda rate: Program(self.problem, rate).relaxed_rate(everyone), accuracy=1e-2)
        if hoped * self.unit_s < _EXACT:
            return None
        best = self._start(hoped)
        if best is None:
            return None
        bound = hoped * 1.02
        try:
            while best.rate * (1 + self.gap) < bound and self.left_s() > 0:
                better = self._beyond(best.rate * (1 + self.gap))
                if better is None:
                    bound = best.rate * (1 + self.gap)
                else:
                    best = better
        except OutOfTime:
            pass
        return replace(best, bound=bound, gap=max(0.0, bound / best.rate - 1))

    def _start(self, hoped: float) -> _Found | None:
        """A good point, at a rate that some plan can promise."""
        guess = 0.85 * hoped
        while True:
            best: _Found | None = None
            program = Program(self.problem, guess)
            for promise, plan in self._promising(program, guess):
                if best is not None and promise <= best.rate:
                    break
                best = self._rounded(program, plan, best.rate if best else 0.0) or best
            if best is not None or guess == 0:
                return best
            guess = guess / 2 if guess > hoped / 50 else 0.0

    def _beyond(self, rate: float) -> _Found | None:
        """A point that reaches ``rate`` or more; ``None`` where it is proved that there is none.

        Where caps are shared the answer is quick. What that leaves open is asked without an objective, which is several
        times faster than to look for the best."""
        program = Program(self.problem, rate)
        promises = self._promising(program, rate)
        program.demand(rate)
        left = []
        for _, plan in promises:
            shared = program.copy()
            shared.allow([plan])
            shared.share_caps()
            if shared.minimise(shared.nothing, time_limit_s=self.left_s()) is None:
                continue
            found = self._rounded(program, plan)
            if found is not None:
                return found
            left.append(plan)
        for plan in left:
            program.allow([plan])
            point = program.minimise(program.nothing, time_limit_s=self.left_s())
            if point is not None:
                return _Found(point=point, rate=max(rate, self._settled(point)), bound=math.inf, gap=math.inf)
        return None

    def _rounded(self, program: Program, plan: int, known: float = 0.0) -> _Found | None:
        """A good point of one plan: the best with shared caps, each replica then given one; ``None`` where it is not
        better than ``known`` steps/s.

        What a programme promises, or its own rate where that is more, its points do not exceed once their rate has
        come true."""
        point = self._with_caps(program, plan, -program.rate_row(), -known * self.unit_s)
        if point is None or max(-point.objective / self.unit_s, program.rate) <= known:
            return None
        rate = self._settled(point)
        if rate <= known or rate * self.unit_s <= _EXACT:
            return None
        return _Found(point=point, rate=rate, bound=math.inf, gap=math.inf)

    def _with_caps(self, program: Program, plan: int, objective: Floats, known: float) -> Point | None:
        """A good point of one plan by rounding its shared caps; not always the best. ``None`` where shared caps do no
        better than an objective of ``known``."""
        program = program.copy()
        program.allow([plan])
        program.share_caps()
        shared = program.minimise(objective, gap=self.gap, time_limit_s=self.left_s())
        if shared is None or shared.objective >= known:
            return None
        program.round_caps(shared)
        return program.minimise(objective, gap=self.gap, time_limit_s=self.left_s())

    def _promising(self, program: Program, rate: float) -> list[tuple[float, int]]:
        """Plans that may reach ``rate``, with what they cannot exceed, the most promising first: halving the plans, and
        leaving a half alone whose relaxed optimum is less."""
        found = []
        halves = [[plan for plan, missed in enumerate(self.missed) if rate < missed]]
        while halves:
            plans = halves.pop()
            promise = program.relaxed_rate(plans) if plans else 0.0
            if promise < rate * (1 - _EXACT) or promise == 0:
                for plan in plans:
                    self.missed[plan] = rate
                continue
            if len(plans) == 1:
                found.append((promise, plans[0]))
            else:
                middle = len(plans) // 2
                halves += [plans[middle:], plans[:middle]]
        return sorted(found, key=lambda promise: (-promise[0], promise[1]))

    # --- Aim B and the passes after it ----------------------------------------------------------------------------

    def cheapest(self, target: float) -> _Found | None:
        """The least cost of ``target`` steps/s; updates are charged at just that rate."""
        missing = [s.device for s in self.problem.supplies if s.price_per_hour is None]
        if missing:
            raise PlanError(f"the least cost cannot be found without the price of {', '.join(missing)}")
        point = self._least_cost(target)
        if point is None:
            return None
        rate = max(target, self._settled(point))
        return _Found(point=point, rate=rate, bound=rate, gap=self.gap)

    def simplified(self, found: _Found) -> _Found:
        """Least cost at (almost) the rate found, then fewest kinds of column at that cost."""
        target = self.problem.target_steps_per_s
        floor = found.rate * (1 - self.gap) if target is None else target
        point = found.point
        try:
            if target is None:
                point = self._cheaper(point, floor)
            point = self._fewest_kinds(point, floor)
        except OutOfTime:
            pass
        rate = self._settled(point)
        if point is found.point or rate < floor * (1 - 1e-6):
            return found
        if target is not None:
            return replace(found, point=point, rate=max(rate, target), bound=max(rate, target))
        return replace(found, point=point, rate=rate, gap=max(0.0, found.bound / rate - 1))

    def _least_cost(self, target: float) -> Point | None:
        """The cheapest point that reaches ``target``, proved to the gap: each promising plan on its own, unless sharing
        caps would not do."""
        program = Program(self.problem, target)
        costs = program.cost_row(program.costs)
        promises = self._promising(program, target)
        program.demand(target * (1 - _EXACT))
        best, least = None, math.inf
        for _, plan in promises:
            point = self._with_caps(program, plan, costs, least)
            if point is not None and _value(program, costs, point) < least:
                best, least = point, _value(program, costs, point)
        for _, plan in promises:
            if best is not None:
                program.limit(costs, least * (1 - self.gap))
            program.allow([plan])
            shared = program.copy()
            shared.share_caps()
            for asked in (shared, program):
                if asked.minimise(asked.nothing, time_limit_s=self.left_s()) is None:
                    break
            else:
                point = program.minimise(costs, gap=self.gap, time_limit_s=self.left_s())
                if point is not None:
                    best, least = point, _value(program, costs, point)
        return best

    def _cheaper(self, point: Point, rate: float) -> Point:
        """A point of almost the same rate that costs less, where rounding finds one."""
        program = Program(self.problem, rate)
        costs = program.cost_row(program.costs)
        promises = self._promising(program, rate)
        program.demand(rate * (1 - _EXACT))
        for _, plan in promises:
            least = _value(program, costs, point)
            other = self._with_caps(program, plan, costs, least * (1 - self.gap))
            if other is not None and _value(program, costs, other) < least:
                point = other
        return point

    def _fewest_kinds(self, point: Point, rate: float) -> Point:
        """The same trainer, at the same cost, with fewer of the kinds of column in use."""
        program = Program(self.problem, rate)
        program.allow(np.flatnonzero(point.z).tolist())
        program.top[program.at["y"][point.y == 0]] = 0
        program.demand(rate * (1 - _EXACT))
        costs = program.cost_row(program.costs)
        program.limit(costs, _value(program, costs, point) * (1 + 1e-6))
        program.count_kinds()
        fewer = program.minimise(program.unit_row("kinds"), gap=_ROUGH, time_limit_s=self.left_s())
        return point if fewer is None or np.count_nonzero(fewer.y) >= np.count_nonzero(point.y) else fewer

    # --- Rates that come true -------------------------------------------------------------------------------------

    def _settled(self, point: Point) -> float:
        """The rate that the replicas and the trainer of ``point`` reach."""
        plans = np.flatnonzero(point.z).tolist()

        def optimum(rate: float) -> float:
            program = Program(self.problem, rate)
            program.fix(point)
            return program.relaxed_rate(plans)

        return self._come_true(optimum, accuracy=1e-7)

    def _come_true(self, optimum: Callable[[float], float], accuracy: float) -> float:
        """The rate l with T(l) = l, from below: false position (Illinois) on T(l) - l, which falls."""
        low, at_low = 0.0, optimum(0.0)
        if not any(any(c.updates_s) for c in self.problem.columns):
            return at_low
        high, at_high = at_low, optimum(at_low) - at_low
        while at_high < 0 and high - low > accuracy * high:
            guess = (low * at_high - high * at_low) / (at_high - at_low)
            excess = optimum(guess) - guess
            if excess >= 0:
                low, at_low, at_high = guess, excess, at_high / 2
                if excess <= accuracy * guess:
                    break
            else:
                high, at_high, at_low = guess, excess, at_low / 2
        return low if at_high < 0 else high


def _value(program: Program, row: Floats, point: Point) -> float:
    """A function of replicas and trainer."""
    return float(row[program.at["y"]] @ point.y + row[program.at["z"]] @ point.z)


# --- From variables to a solution -------------------------------------------------------------------------------------


def _solution(problem: Problem, found: _Found, search: _Search) -> Solution:
    program = Program(problem, found.rate * (1 - _EXACT))
    program.fix(found.point)
    program.demand(found.rate * (1 - 10 * _EXACT))
    program.limit(program.rate_row(), found.rate * program.unit_s)
    point = program.minimise(program.staleness_row(), whole=False)
    assert point is not None, "what a solution reaches it can be held to"
    per_cycle = np.array([b.share for b in problem.workload.buckets]) * problem.workload.batch_size / program.unit_s
    plan = problem.plans[int(np.argmax(found.point.z))]
    prices = [s.price_per_hour for s in problem.supplies]
    costs = program.cost_row(program.prices)
    return Solution(
        plan=plan,
        replicas=tuple(int(y) for y in found.point.y),
        rates=tuple(map(tuple, (point.x * per_cycle).tolist())),
        steps_per_s=found.rate,
        bound_steps_per_s=found.bound,
        cost_per_hour=None if None in prices else _value(program, costs, found.point),
        staleness_needed=_staleness_needed(problem, found),
        bindings=_bindings(problem, program, found.point, point),
        gap=found.gap,
        solve_s=0.0,
    )


def _staleness_needed(problem: Problem, found: _Found) -> int:
    """The least bound under which these replicas and this trainer keep their rate."""
    rate = found.rate * (1 - TOLERANCE)
    for alone in (True, False):
        bound = replace(problem, max_staleness=0 if alone else max(1, problem.max_staleness), tail="none")
        program = Program(bound, rate)
        needed = program.staleness_row()
        program.bottom[program.at["staleness"]], program.top[program.at["staleness"]] = 0, np.inf
        program.fix(replace(found.point, used=found.point.used[:0]))
        program.demand(rate * (1 - _EXACT))
        point = program.minimise(needed, whole=False)
        if alone and point is not None and point.objective <= 1 + 1e-6:
            return 0
        if point is not None and not alone:
            return min(problem.max_staleness, max(1, math.ceil(point.objective - 1 - 1e-6)))
    return problem.max_staleness


def _bindings(problem: Problem, program: Program, whole: Point, point: Point) -> tuple[Binding, ...]:
    """Limits without slack, in the order of the rows."""
    found = []

    def note(row: Any, subject: str, slack: float) -> None:
        if slack <= _TIGHT:
            found.append(Binding(row=row, subject=subject, slack=max(0.0, slack)))

    for c in np.flatnonzero(whole.y):
        column = problem.columns[c]
        name = f"{column.device} tp {column.tp} pp {column.pp} batch {column.batch_cap}"
        note("replicas", name, 1 - float(program.replica_time[c] @ point.x[c]) / whole.y[c])
        if problem.workload.held_s:
            note("cache", name, 1 - float(program.cache_time[c] @ point.x[c]) / whole.y[c])
    note("trainer", "", 1 - float(point.busy.sum()))
    for g, supply in enumerate(problem.supplies):
        used = float((program.sizes * program.kinds[g]) @ whole.y + program.training[:, g] @ whole.z)
        note("stock", supply.device, 1 - used / supply.count)
    if problem.budget_per_hour is not None:
        spent = _value(program, program.cost_row(program.prices), whole)
        note("budget", "", 1 - spent / problem.budget_per_hour)
    staleness = float((program.longest * program.ell * point.x).sum() + point.busy.sum())
    note("staleness", "", 1 - staleness / (problem.max_staleness + 1))
    if problem.tail != "none":
        limit = problem.max_staleness + (problem.tail == "soft")
        late = (program.ell_max * float(program.speeds @ point.busy) + float(point.busy.sum()))[point.x > 1e-9]
        note("tail", "", 1 - float(late.max()) / limit if limit else 0.0)
    return tuple(found)


# --- Order and names do not matter ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """A problem in canonical order, and the way back."""

    problem: Problem
    columns: tuple[int, ...]
    """Place in the canonical order of each original column."""

    def restored(self, solution: Solution) -> Solution:
        return replace(
            solution,
            replicas=tuple(solution.replicas[i] for i in self.columns),
            rates=tuple(solution.rates[i] for i in self.columns),
        )


def _canonical(problem: Problem) -> _Order:
    """Sorted by what things are, never by what they are called."""

    def signature(index: int) -> tuple[Any, ...]:
        c = problem.columns[index]
        return (c.num_devices, c.batch_cap, c.tp, c.rates, c.group_latencies_s, c.updates_s, c.kv_bytes, c.kv_byte_s)

    members: dict[str, list[int]] = {supply.device: [] for supply in problem.supplies}
    for index in sorted(range(len(problem.columns)), key=signature):
        members[problem.columns[index].device].append(index)

    def kind(supply: Supply) -> tuple[Any, ...]:
        limits = tuple(
            -1.0 if v is None else v for v in (supply.price_per_hour, supply.max_rollout, supply.max_training)
        )
        plans = sorted((p.cycle_s, p.count(supply.device)) for p in problem.plans if p.count(supply.device))
        return (supply.count, *limits, [signature(i) for i in members[supply.device]], plans)

    supplies = sorted(problem.supplies, key=kind)
    columns = [index for supply in supplies for index in members[supply.device]]
    plans = sorted(problem.plans, key=lambda p: (p.cycle_s, p.step_s, [p.count(s.device) for s in supplies]))
    ordered = replace(
        problem,
        supplies=tuple(supplies),
        columns=tuple(problem.columns[i] for i in columns),
        plans=tuple(plans),
    )
    places = {index: place for place, index in enumerate(columns)}
    return _Order(problem=ordered, columns=tuple(places[i] for i in range(len(columns))))
