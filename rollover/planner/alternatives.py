"""Alternatives to a plan: fleets of one type for the same money, the best plan that this version can run, and the
cheapest plan that is almost as fast.

All are solved like the plan itself: same lengths, tail and staleness bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rollover.devices.records import Device
from rollover.errors import PlanError
from rollover.planner.plan import Alternative, Plan, devices_used
from rollover.planner.problem import PlanSpec, stock_problem
from rollover.planner.records import Fleet, Problem, Solution
from rollover.planner.search import make_plan, solve_finely

ALMOST = 0.01
"""Fraction of the rate that the leaner plan may give up."""


def alternatives(plan: Plan) -> tuple[Alternative, ...]:
    """List the feasible alternatives, fastest first."""
    return tuple(sorted(_of_one_type(plan), key=lambda a: (-a.steps_per_s, a.name)))


def one_type(plan: Plan, device: Device, count: int) -> tuple[Problem, Solution] | None:
    """Return the best plan on ``count`` devices of one type, or ``None``."""
    try:
        built = stock_problem({device: count}, plan.model, plan.workload, max_staleness=plan.problem.max_staleness)
    except PlanError:
        return None
    return solve_finely(replace(built, tail=plan.problem.tail), [device], plan.model)


def launchable(plan: Plan) -> Alternative | None:
    """Return the best plan that ``rollover launch`` can run; ``None`` if it can run this one, or none of this fleet."""
    if not any(plan.obstacles):
        return None
    return _planned("what rollover launch can run", plan, plan.fleet, replace(_spec(plan), launchable="vllm"))


def unlimited(plan: Plan) -> Alternative | None:
    """Return the best plan, whether or not ``rollover launch`` can run it."""
    return _planned("the best plan, runnable or not", plan, plan.fleet, _spec(plan))


def leaner(plan: Plan) -> Alternative | None:
    """Return the cheapest plan that is almost as fast, or the one with the fewest devices where a price is missing;
    ``None`` if a target rate was given, since the plan is then the cheapest of its rate already."""
    if plan.problem.target_steps_per_s is not None:
        return None
    fleet = replace(plan.fleet, budget_per_hour=None)
    if any(device.price_per_hour is None for device in fleet.devices):
        nodes = (replace(node, device=replace(node.device, price_per_hour=1.0)) for node in fleet.nodes)
        fleet = replace(fleet, nodes=tuple(nodes))
    target = plan.solution.steps_per_s * (1 - ALMOST)
    spec = replace(_spec(plan), target_steps_per_s=target)
    return _planned("the cheapest plan that is almost as fast", plan, fleet, spec)


def _spec(plan: Plan) -> PlanSpec:
    """Return the specification of ``plan`` without its target."""
    return PlanSpec(
        model=plan.model, workload=plan.workload, max_staleness=plan.problem.max_staleness, tail=plan.problem.tail
    )


def _planned(name: str, plan: Plan, fleet: Fleet, spec: PlanSpec) -> Alternative | None:
    """Plan ``fleet``, which is that of ``plan`` but for prices; the prices of ``plan`` count."""
    try:
        made = make_plan(fleet, spec)
    except PlanError:
        return None
    return Alternative(
        name=name,
        steps_per_s=made.solution.steps_per_s,
        cost_per_hour=replace(made, fleet=plan.fleet).cost_per_hour,
        devices=made.used,
    )


def _of_one_type(plan: Plan) -> Iterator[Alternative]:
    """Plan as many devices of one type as the plan's cost buys; where prices are missing, those of the fleet."""
    money = plan.solution.cost_per_hour
    for device, stock in plan.fleet.stock.items():
        count, name = stock, f"the fleet's {device.name} alone"
        if money is not None and device.price_per_hour is not None:
            count = int(money / device.price_per_hour * (1 + 1e-9))
            name = f"{device.name} alone, for the same money"
        found = one_type(plan, device, count) if count else None
        if found is not None:
            yield _alternative(name, *found)


def _alternative(name: str, problem: Problem, solution: Solution) -> Alternative:
    used = devices_used(problem, solution)
    return Alternative(
        name=name,
        steps_per_s=solution.steps_per_s,
        cost_per_hour=solution.cost_per_hour,
        devices={s.device: used[s.device] for s in problem.supplies if s.device in used},
    )
