"""Phases 1 and 2, repeated on all nodes of a fleet until they agree.

The links that phase 1 assumed are replaced by those of the placement, the shapes that were placed are re-costed, and
both phases run again until cycle times change by less than ``SETTLED``. A plan is judged by its costs on the links it
really uses: the best of all rounds is kept, and its numbers are the re-costed ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rollover.devices.records import Link
from rollover.errors import PlanError
from rollover.planner.explain import why_infeasible
from rollover.planner.optimum import solve
from rollover.planner.placed import PlacedSolution, costed_on_links
from rollover.planner.placement import Placement, place
from rollover.planner.plan import Plan, PlanningRound
from rollover.planner.problem import PlanSpec, fleet_problem
from rollover.planner.records import Fleet, Problem, Solution
from rollover.planner.routing import routed
from rollover.planner.topology import Topology

SETTLED = 0.02
"""Relative change of a time below which the rounds end."""
MAX_ROUNDS = 5
_SHORT = 1e-3
"""Fraction of a requested rate that may be missing: the solver's tolerance."""


def with_networks(fleet: Fleet, networks: Mapping[str, Link]) -> Fleet:
    """Return the fleet as phase 1 should see it. ``networks``: links between nodes by device type, where they differ
    from the fleet's."""
    nodes = [
        replace(n, device=replace(n.device, network=networks.get(n.device.name, n.device.network))) for n in fleet.nodes
    ]
    return replace(fleet, nodes=tuple(nodes))


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
        problem = _with_placed(fleet_problem(with_networks(fleet, networks), spec), met)
        solution = solve(routed(problem, spec.routing))
        if solution is None:
            if found:
                break
            message = why_infeasible(routed(problem, spec.routing)) if explain else "no plan satisfies all limits"
            raise PlanError(message)
        placement = place(topology, model, problem, solution, metis=spec.metis)
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
