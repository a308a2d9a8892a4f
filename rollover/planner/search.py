"""The best plan for a fleet: of all its nodes, or of a part of them where the links between them are in the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollover.errors import PlanError
from rollover.planner.optimum import GAP, may_reach
from rollover.planner.placement import Pipeline
from rollover.planner.plan import Plan
from rollover.planner.problem import PlanSpec, fleet_problem
from rollover.planner.records import Fleet, Supply
from rollover.planner.rounds import best_of_rounds, rank, with_networks
from rollover.planner.routing import routed
from rollover.planner.solution import held
from rollover.planner.subfleets import alone, inside, parts, widest


def make_plan(fleet: Fleet, spec: PlanSpec) -> Plan:
    """Make the best plan found: the fastest, or with a target the cheapest that reaches it.

    Raises:
        PlanError: nothing satisfies the limits; the message says which stand in the way.
    """
    best, refused = None, None
    try:
        best = best_of_rounds(spec, fleet, inside(fleet))
    except PlanError as error:
        refused = error
    for nodes in parts(fleet):
        made = _better(spec, alone(fleet, nodes), best)
        if made is not None:
            best = _on(fleet, made, nodes)
    if best is None:
        assert refused is not None
        raise refused
    return best


def _better(spec: PlanSpec, part: Fleet, best: Plan | None) -> Plan | None:
    """Return a plan on a part of the fleet alone that is better than ``best``, if there is one."""
    try:
        if best is not None and not _may_beat(spec, part, best):
            return None
        made = best_of_rounds(spec, part, inside(part), explain=False)
    except PlanError:
        return None
    return made if best is None or rank(made) < rank(best) else None


def _may_beat(spec: PlanSpec, part: Fleet, best: Plan) -> bool:
    """Return False if it is proved that the part does not beat ``best``, even with all its links as wide as its
    widest."""
    problem = routed(fleet_problem(with_networks(part, widest(part)), spec), spec.routing)
    target = spec.target_steps_per_s
    if target is None:
        return may_reach(problem, best.solution.steps_per_s * (1 + GAP))
    assert best.cost_per_hour is not None
    return may_reach(problem, target, best.cost_per_hour * (1 - GAP))


def _on(fleet: Fleet, plan: Plan, nodes: Sequence[int]) -> Plan:
    """Return the plan of a part as one of the whole fleet, whose other nodes are idle."""
    placement = plan.placement
    supplies = tuple(
        Supply(device=device.name, count=count, price_per_hour=device.price_per_hour)
        for device, count in fleet.stock.items()
    )
    problem = replace(plan.problem, supplies=supplies)
    solution = held(problem, plan.solution.replicas)
    assert solution is not None, "more devices take no limit away"
    return replace(
        plan,
        fleet=fleet,
        problem=problem,
        solution=replace(solution, gap=plan.solution.gap, solve_s=plan.solution.solve_s),
        placement=replace(
            placement,
            training=tuple(_moved(pipeline, nodes) for pipeline in placement.training),
            replicas=tuple(_moved(pipeline, nodes) for pipeline in placement.replicas),
        ),
    )


def _moved(pipeline: Pipeline, nodes: Sequence[int]) -> Pipeline:
    return replace(pipeline, stages=tuple(replace(stage, node=nodes[stage.node]) for stage in pipeline.stages))
