"""The best plan for a fleet: of all its nodes, or of a part of them where the links between them are in the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollover.devices.records import ModelShape, WorkloadSpec
from rollover.errors import PlanError
from rollover.planner.milp import GAP, may_reach
from rollover.planner.parts import alone, inside, parts, widest
from rollover.planner.placement import Pipeline
from rollover.planner.plan import Plan
from rollover.planner.records import Fleet, Supply, Tail
from rollover.planner.rounds import Question, best_of_rounds, rank
from rollover.planner.routing import Routing
from rollover.planner.solution import held


def make_plan(
    fleet: Fleet,
    model: ModelShape,
    workload: WorkloadSpec,
    *,
    max_staleness: int,
    target_steps_per_s: float | None = None,
    tail: Tail = "soft",
    routing: Routing = "load",
    one_device: bool = False,
    metis: bool = False,
    seed: int = 0,
) -> Plan:
    """The best plan found: the fastest, or with a target the cheapest that reaches it.

    With the ``tail`` row even the longest response keeps the staleness bound, so that no step waits for one; without
    it the bound is kept on average only. The scheduler keeps it for every group, by waiting. ``one_device``: with a
    trainer of a single device.

    Raises:
        PlanError: nothing satisfies the limits; the message says which stand in the way.
    """
    question = Question(
        model=model,
        workload=workload,
        max_staleness=max_staleness,
        target_steps_per_s=target_steps_per_s,
        tail=tail,
        routing=routing,
        one_device=one_device,
        metis=metis,
        seed=seed,
    )
    best, refused = None, None
    try:
        best = best_of_rounds(question, fleet, inside(fleet))
    except PlanError as error:
        refused = error
    for nodes in parts(fleet):
        made = _better(question, alone(fleet, nodes), best)
        if made is not None:
            best = _on(fleet, made, nodes)
    if best is None:
        assert refused is not None
        raise refused
    return best


def _better(question: Question, part: Fleet, best: Plan | None) -> Plan | None:
    """A plan on a part of the fleet alone that is better than ``best``, if there is one."""
    try:
        if best is not None and not _may_beat(question, part, best):
            return None
        made = best_of_rounds(question, part, inside(part), explain=False)
    except PlanError:
        return None
    return made if best is None or rank(made) < rank(best) else None


def _may_beat(question: Question, part: Fleet, best: Plan) -> bool:
    """Whether the part might do better than ``best`` if all its links were as wide as its widest."""
    problem = question.routed(question.problem(part, widest(part)))
    target = question.target_steps_per_s
    if target is None:
        return may_reach(problem, best.solution.steps_per_s * (1 + GAP))
    assert best.cost_per_hour is not None
    return may_reach(problem, target, best.cost_per_hour * (1 - GAP))


def _on(fleet: Fleet, plan: Plan, nodes: Sequence[int]) -> Plan:
    """The plan of a part as one of the whole fleet, whose other nodes are idle."""
    placement = plan.placement
    supplies = tuple(
        Supply(device=device.name, count=count, price_per_hour=device.price_per_hour)
        for device, count in zip(fleet.devices, fleet.stock, strict=True)
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
