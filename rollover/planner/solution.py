"""From whole numbers to a solution: the rate of given replicas and a given trainer, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import brentq

from rollover.planner.milp import Program, ProgramPoint
from rollover.planner.rate_demand import Floats, RateDemand
from rollover.planner.records import Binding, Problem, Solution

TOLERANCE = 1e-3
"""Fraction of the rate that a lower staleness bound may cost and still count as enough."""
TIGHT = 2e-3
"""Relative slack below which a limit binds: a little over what the search gives away."""
_ACCURACY = 1e-7
"""Relative, of a rate."""
_EXACT = 1e-8
_SHORT = 1e-3
"""Fraction of the samples that may be missing at a rate that the solver reports as reached."""
_SLOWEST = 1e-9
"""Fraction of the trainer's own rate below which a rate counts as zero."""


def held(problem: Problem, replicas: Sequence[int]) -> Solution | None:
    """Return the best solution with just these ``replicas`` of each kind and the problem's one training plan; ``None``
    if they break a limit."""
    (_,) = problem.plans
    counts = np.array(replicas, dtype=np.float64)
    rate = rate_reached(problem, counts, 0)
    return None if rate is None else described(problem, counts, 0, rate, bound=rate, gap=0.0)


def rate_reached(
    problem: Problem, replicas: Floats, plan: int, *, known: float = 0.0, accuracy: float = _ACCURACY
) -> float | None:
    """Return the steps/s of these replicas and this trainer, at least ``known``; ``None`` where they reach no rate."""
    active = np.flatnonzero(replicas)
    alone = replace(
        problem, replica_kinds=tuple(problem.replica_kinds[c] for c in active), plans=(problem.plans[plan],)
    )
    counts = replicas[active]

    def late(rate: float) -> float:
        return 0.0 if RateDemand(alone, rate).in_time([0]).any() else -1.0

    def share(rate: float) -> float:
        program = Program(RateDemand(alone, rate), [0], most=counts)
        program.fix()
        point = program.minimise(program.open_share(0.0))
        return 0.0 if point is None else -point.objective

    if not len(active):
        return None
    fastest = 1 / problem.plans[plan].cycle_s
    # The tail is a step, which is found without any linear programme: the rest is smooth below it.
    top = fastest if problem.tail == "none" else highest(late, fastest, known=known, accuracy=accuracy)
    if top <= fastest * _SLOWEST:
        return None
    found = highest(lambda rate: share(rate) - 1, top, known=known, accuracy=accuracy)
    return found if found > fastest * _SLOWEST else None


def highest(surplus: Callable[[float], float], top: float, *, known: float, accuracy: float) -> float:
    """Find the highest rate up to ``top`` with a ``surplus`` of zero or more, from below; the surplus falls in the rate
    and is assumed not to be negative at ``known``."""
    tried = [known]

    def height(rate: float) -> float:
        left = surplus(rate)
        if left >= -_EXACT:
            tried.append(rate)
        return math.log(max(1 + left, 1e-3)) + _EXACT

    if height(top) >= 0:
        return max(tried)
    low, slowest = known or top / 2, top * _SLOWEST
    while height(low) < 0:
        if low < slowest:
            return known
        top, low = low, low / 8
    if top > low:
        # Where the samples that can be decoded in a second hardly depend on the rate, this is a straight line.
        brentq(lambda log: height(math.exp(log)), math.log(low), math.log(top), xtol=accuracy)
    return max(tried)


def described(problem: Problem, replicas: Floats, plan: int, rate: float, *, bound: float, gap: float) -> Solution:
    """Return the solution of these whole numbers at ``rate``, with the samples that keep staleness lowest."""
    demand = RateDemand(problem, rate)
    program = Program(demand, [plan], most=replicas)
    program.fix()
    reached = program.copy()
    most = reached.minimise(reached.open_share(0.0))
    assert most is not None, "no samples at all are always possible"
    share = min(1.0, -most.objective)  # short of 1 by the solver's tolerance, where updates take most of the time
    assert share > 1 - _SHORT, "what a solution reaches it can be held to"
    program.open_share(share * (1 - 1e-7))
    point = program.minimise(program.staleness_row())
    assert point is not None, "so many samples are possible"
    prices = [s.price_per_hour for s in problem.supplies]
    return Solution(
        plan=problem.plans[plan],
        replicas=tuple(int(y) for y in replicas),
        rates=tuple((point.x * demand.samples_per_s).tolist()),
        steps_per_s=rate,
        bound_steps_per_s=bound,
        cost_per_hour=None if None in prices else float(_used(demand, replicas, plan) @ demand.prices),
        staleness_needed=_staleness_needed(problem, replicas, plan, rate * (1 - TOLERANCE)),
        bindings=_bindings(demand, replicas, point),
        gap=gap,
        solve_s=0.0,
    )


def _used(demand: RateDemand, replicas: Floats, plan: int) -> Floats:
    """Return (G,): the number of devices of each type in use."""
    return demand.of_type @ (demand.sizes * replicas) + demand.training[plan]


def _staleness_needed(problem: Problem, replicas: Floats, plan: int, rate: float) -> int:
    """Return the least bound under which these replicas and this trainer keep ``rate``."""
    for least in (0, 1):
        bound = replace(problem, max_staleness=least and max(1, problem.max_staleness), tail="none")
        program = Program(RateDemand(bound, rate), [plan], most=replicas, unbounded=True)
        program.fix()
        point = program.minimise(program.staleness_row())
        if point is not None and (least or point.objective <= 1 + 1e-6):
            return least and min(problem.max_staleness, max(1, math.ceil(point.objective - 1 - 1e-6)))
    return problem.max_staleness


def _bindings(demand: RateDemand, replicas: Floats, point: ProgramPoint) -> tuple[Binding, ...]:
    """Return the limits without slack, in the order of the rows."""
    problem, bound, busy = demand.problem, demand.problem.max_staleness, float(demand.busy[point.plan])
    found = []

    def note(row: Any, subject: str, slack: float) -> None:
        if slack <= TIGHT:
            found.append(Binding(row=row, subject=subject))

    for c in np.flatnonzero(replicas):
        kind = problem.replica_kinds[c]
        name = f"{kind.device} tp {kind.tp} pp {kind.pp} batch {kind.batch_cap}"
        note("replicas", name, 1 - float(demand.time[c] * point.x[c]) / replicas[c])
        if problem.workload.held_s:
            note("cache", name, 1 - float(demand.cache[c] * point.x[c]) / replicas[c])
    note("trainer", "", 1 - busy)
    used = _used(demand, replicas, point.plan)
    for supply, count in zip(problem.supplies, used, strict=True):
        note("stock", supply.device, 1 - count / supply.count)
    if problem.budget_per_hour is not None:
        note("budget", "", 1 - float(used @ demand.prices) / problem.budget_per_hour)
    note("staleness", "", 1 - (float((demand.waiting * point.x).sum()) + busy) / (bound + 1))
    if problem.tail != "none":
        late = float((demand.longest + busy)[point.x > 1e-9].max())
        limit = bound + (problem.tail == "soft")
        note("tail", "", 1 - late / limit if limit else 0.0)
    return tuple(found)
