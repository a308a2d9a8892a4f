"""Explains why a problem has no solution and how far a limit must be lifted, by solving again without that limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rollover.planner.milp import Limit, OutOfTime, Program, ProgramPoint
from rollover.planner.optimum import GAP, TIME_LIMIT_S, solve
from rollover.planner.rate_load import RateLoad
from rollover.planner.records import Problem

_SLOW = 1e-3
"""Fraction of the fastest trainer's rate that is requested if no rate is given: some replica must generate rollouts."""


def why_infeasible(problem: Problem) -> str:
    """Say which limits leave a problem without a solution, and how far each would have to be lifted where lifting it
    alone is enough."""
    lines = [_headline(problem)]
    lines += [f"  {line}" for line in _remedies(problem)]
    if len(lines) == 1:
        lines.append(f"  {_together(problem)}")
    return "\n".join(lines)


def _together(problem: Problem) -> str:
    """Say whether all limits together stand in the way, where none does alone."""
    free = replace(problem, budget_per_hour=None)
    if _elastic(free, ["stock", "staleness"]) is not None:
        return "stock, budget and staleness together rule out every plan: lifting one of them alone is not enough"
    fastest = min(problem.plans, key=lambda plan: plan.cycle_s)
    return (
        f"the fastest trainer that fits this fleet takes {fastest.cycle_s:.3g} s for a step and its weight update: "
        "use a smaller batch or shorter responses"
    )


def _headline(problem: Problem) -> str:
    target = problem.target_steps_per_s
    if target is None:
        return "no plan satisfies all limits:"
    fastest = solve(replace(problem, target_steps_per_s=None), simplify=False)
    if fastest is None:
        return f"no plan satisfies all limits at any rate; {_rate(problem, target)} are requested:"
    reached = _rate(problem, fastest.steps_per_s)
    return f"{_rate(problem, target)} cannot be reached; the fastest plan reaches about {reached}:"


def _rate(problem: Problem, steps_per_s: float) -> str:
    tokens_per_s = steps_per_s * problem.workload.batch_size * problem.workload.response_tokens
    return f"{tokens_per_s:,.0f} tokens/s" if tokens_per_s >= 100 else f"{tokens_per_s:.3g} tokens/s"


def _remedies(problem: Problem) -> Iterator[str]:
    """Yield, for each limit, the least change that makes room, if changing it alone does."""
    point = _elastic(problem, ["stock"])
    if point is not None:
        more = [f"{round(n)} more {s.device}" for n, s in zip(point.extra, problem.supplies, strict=True) if n]
        if more:
            yield f"stock: {' and '.join(more)} would be enough"
    if problem.budget_per_hour is not None:
        found = _elastic(replace(problem, budget_per_hour=None), [])
        if found is not None:
            yield f"budget: {found.objective:.2f} per hour would be enough, {problem.budget_per_hour:g} is given"
    found = _elastic(problem, ["staleness"])
    if found is not None and round(found.objective) > problem.max_staleness:
        yield f"staleness: max_staleness {round(found.objective)} would be enough, {problem.max_staleness} is given"
    if problem.tail != "none" and _elastic(replace(problem, tail="none"), []) is not None:
        yield f"tail: without '{problem.tail}', a plan keeps the bound on average, but its longest responses exceed it"


def _elastic(problem: Problem, relaxed: Sequence[Limit]) -> ProgramPoint | None:
    """Find the least growth of what ``relaxed`` lets grow (devices beyond the stock, or the bound), or the least cost
    where it lets nothing grow."""
    some_rate = _SLOW / min(plan.cycle_s for plan in problem.plans)
    load = RateLoad(problem, problem.target_steps_per_s or some_rate, any_bound="staleness" in relaxed)
    plans = load.able(any_stock="stock" in relaxed)
    if not plans:
        return None
    program = Program(load, plans, relaxed=relaxed)
    if "stock" in relaxed:
        objective = program.unit_row("extra")
    elif "staleness" in relaxed:
        objective = program.unit_row("staleness")
    else:
        objective = program.cost_row(load.costs)
    try:
        return program.minimise(objective, gap=GAP, time_limit_s=TIME_LIMIT_S)
    except OutOfTime:
        return None
