"""The best plan for a fleet: of all its nodes, or of a part of them where the links between them are in the way.

A plan on all nodes reckons with the links between them, and a slow one costs more than the nodes beyond it bring.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from scipy.sparse.csgraph import connected_components

from rollover.devices.records import Link
from rollover.errors import PlanError
from rollover.planner.explain import why_infeasible
from rollover.planner.optimum import GAP, may_reach, solve
from rollover.planner.placement import Pipeline, PlacedSolution, Placement, costed_on_links, place
from rollover.planner.plan import Plan, PlanningRound
from rollover.planner.problem import PlanSpec, fleet_problem, routed, supplies
from rollover.planner.records import Fleet, Problem, Solution
from rollover.planner.solution import held
from rollover.planner.topology import Topology

_MOST_PARTS = 48
"""Maximum number of parts considered, counted by their numbers of nodes of each kind."""


def make_plan(fleet: Fleet, spec: PlanSpec) -> Plan:
    """Make the best plan found: the fastest, or with a target the cheapest that reaches it.

    Raises:
        PlanError: nothing satisfies the limits; the message says which ones rule out every plan.
    """
    best, refused = None, None
    try:
        best = best_of_rounds(spec, fleet)
    except PlanError as error:
        refused = error
    for nodes in _parts(fleet):
        made = _better(spec, _alone(fleet, nodes), best)
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
        made = best_of_rounds(spec, part, explain=False)
    except PlanError:
        return None
    return made if best is None or rank(made) < rank(best) else None


def _may_beat(spec: PlanSpec, part: Fleet, best: Plan) -> bool:
    """Return False if it is proved that the part does not beat ``best``, even with all its links as wide as its
    widest."""
    problem = routed(fleet_problem(part, spec, _widest(part)), spec.routing)
    target = spec.target_steps_per_s
    if target is None:
        return may_reach(problem, best.solution.steps_per_s * (1 + GAP))
    assert best.cost_per_hour is not None
    return may_reach(problem, target, best.cost_per_hour * (1 - GAP))


def _on(fleet: Fleet, plan: Plan, nodes: Sequence[int]) -> Plan:
    """Return the plan of a part as one of the whole fleet, whose other nodes are idle."""
    placement = plan.placement
    problem = replace(plan.problem, supplies=supplies(fleet.stock))
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


# --- Parts of a fleet -------------------------------------------------------------------------------------------------


def _parts(fleet: Fleet) -> list[tuple[int, ...]]:
    """List the nodes of each part that may deserve a plan of its own, the smallest first, never all of them.

    Of nodes that stand alike, any number: every combination of numbers, where there are no more than ``_MOST_PARTS``,
    else one node, half of them or all, of one kind or two. Further the islands: nodes joined by links of some width or
    more.
    """
    if len(fleet.nodes) == 1:
        return []
    topology = Topology.of(fleet)
    kinds = _kinds(fleet, topology)
    found = [tuple(sorted(itertools.chain(*taken))) for taken in _taken(kinds)]
    found += _islands(topology)
    whole = len(fleet.nodes)
    return sorted({nodes for nodes in found if 0 < len(nodes) < whole}, key=lambda nodes: (len(nodes), nodes))


def _alone(fleet: Fleet, nodes: Sequence[int]) -> Fleet:
    """Return the part as a fleet."""
    kept = tuple(fleet.nodes[i] for i in nodes)
    names = {node.name for node in kept}
    return replace(fleet, nodes=kept, links=tuple(link for link in fleet.links if {link[0], link[1]} <= names))


def _widest(fleet: Fleet) -> dict[str, Link]:
    """Return links at least as wide as any that a plan on the fleet can meet, inside a node or between two."""
    topology = Topology.of(fleet)
    best = Link(bytes_per_s=float(topology.widths.max()), latency_s=float(topology.latencies.min()))
    return {device.name: best for device in fleet.devices}


def _kinds(fleet: Fleet, topology: Topology) -> list[list[int]]:
    """Return the sets of nodes that have the same device and equal links."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for i, node in enumerate(fleet.nodes):
        links = tuple(sorted(zip(topology.widths[i].tolist(), topology.latencies[i].tolist(), strict=True)))
        kinds.setdefault((node.device.name, links), []).append(i)
    return list(kinds.values())


def _taken(kinds: list[list[int]]) -> Iterator[Sequence[Sequence[int]]]:
    """Return how many of each kind are taken."""
    if np.prod([float(len(nodes) + 1) for nodes in kinds]) <= _MOST_PARTS:
        yield from itertools.product(*([nodes[:n] for n in range(len(nodes) + 1)] for nodes in kinds))
        return
    sizes = [[nodes[:n] for n in sorted({1, len(nodes) // 2, len(nodes)} - {0})] for nodes in kinds]
    for pair in itertools.combinations_with_replacement(sizes, 2):
        yield from itertools.product(*(pair if pair[0] is not pair[1] else pair[:1]))


def _islands(topology: Topology) -> list[tuple[int, ...]]:
    """Return the sets of nodes that links of at least some width join, for every width."""
    widths = topology.widths.copy()
    np.fill_diagonal(widths, 0.0)
    found = []
    for width in np.unique(widths[widths > 0]):
        num_islands, island = connected_components(widths >= width, directed=False)
        found += [tuple(np.flatnonzero(island == one).tolist()) for one in range(num_islands)]
    return found


SETTLED = 0.02
"""Relative change of a time below which the rounds end."""
MAX_ROUNDS = 5
_SHORT = 1e-3
"""Fraction of a requested rate that may be missing: the solver's tolerance."""


def best_of_rounds(spec: PlanSpec, fleet: Fleet, *, explain: bool = True) -> Plan:
    """Return the best plan found that may use every node.

    Raises:
        PlanError: nothing satisfies the limits; where it is to ``explain``, the message says which stand in the way.
    """
    topology, networks, model = Topology.of(fleet), _inside(fleet), spec.model
    met: list[Problem] = []
    found: list[Plan] = []
    rounds: list[PlanningRound] = []
    seen = set()
    while len(rounds) < MAX_ROUNDS:
        problem = _with_placed(fleet_problem(fleet, spec, networks), met)
        solution = solve(routed(problem, spec.routing))
        if solution is None:
            if found:
                break
            message = why_infeasible(routed(problem, spec.routing)) if explain else "no plan satisfies all limits"
            raise PlanError(message)
        placement = place(topology, model, problem, solution)
        real = costed_on_links(topology, model, problem, solution, placement, spec.routing)
        rounds.append(_round(solution, real))
        if real.solution is not None:
            proved = replace(real.solution, gap=solution.gap, solve_s=solution.solve_s)
            found.append(
                Plan(
                    fleet=fleet,
                    model=model,
                    workload=spec.workload,
                    routing=spec.routing,
                    problem=real.problem,
                    solution=proved,
                    placement=_renumbered(placement, solution.active),
                )
            )
        choice = (solution.plan.parts, tuple(solution.replicas[c] for c in solution.active))
        if rounds[-1].moved < SETTLED or choice in seen:
            break
        seen.add(choice)
        met.append(real.unrouted)
        networks = {**networks, **real.networks}
    if not found:
        raise PlanError(
            f"no plan satisfies its limits on the links between these nodes ({len(rounds)} were tried):"
            " allow more staleness, a larger budget, a lower target or faster links"
        )
    return replace(min(found, key=rank), rounds=tuple(rounds))


def rank(plan: Plan) -> tuple[float, float]:
    """Return the sort key, lowest first: the cheapest plan that reaches the target, or the fastest."""
    target, rate = plan.problem.target_steps_per_s, plan.solution.steps_per_s
    if target is None:
        return -rate, plan.cost_per_hour or 0.0
    missing = max(0.0, target * (1 - _SHORT) - rate)
    return missing, plan.cost_per_hour or 0.0


def _inside(fleet: Fleet) -> dict[str, Link]:
    """Return the links of a fleet of one node, which nothing leaves; none for larger fleets."""
    return {node.device.name: node.device.link for node in fleet.nodes} if len(fleet.nodes) == 1 else {}


def _renumbered(placement: Placement, active: Sequence[int]) -> Placement:
    """Renumber the replicas' kinds. ``active``: the kinds of the phase-1 problem that are kept, in order."""
    replicas = tuple(replace(r, member=active.index(r.member)) for r in placement.replicas)
    return replace(placement, replicas=replicas)


def _round(assumed: Solution, real: PlacedSolution) -> PlanningRound:
    plan = real.problem.plans[0]
    return PlanningRound(
        assumed_step_s=assumed.plan.step_s,
        step_s=plan.step_s,
        assumed_sync_s=assumed.plan.sync_s,
        sync_s=plan.sync_s,
        assumed_steps_per_s=assumed.steps_per_s,
        steps_per_s=real.solution.steps_per_s if real.solution else 0.0,
    )


def _with_placed(problem: Problem, met: Sequence[Problem]) -> Problem:
    """Replace each shape of the problem by its latest cost on a placement, where it has been placed."""
    plans = {plan.shape: plan for plan in problem.plans}
    kinds = {kind.key: kind for kind in problem.replica_kinds}
    for placed in met:
        plans |= {plan.shape: plan for plan in placed.plans}
        kinds |= {kind.key: kind for kind in placed.replica_kinds}
    return replace(problem, plans=tuple(plans.values()), replica_kinds=tuple(kinds.values()))
