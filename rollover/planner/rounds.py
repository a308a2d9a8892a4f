"""Phase 1, phase 2, and back until they agree, on all nodes of a fleet.

What phase 1 assumed about links is replaced by what the placement met, the shapes that were placed by their re-costed
selves, and both phases are run again, until cycle times move by less than ``SETTLED``. A plan is worth what it costs on
the links it stands on: the best of all rounds is kept, and its numbers are the re-costed ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rollover.devices.records import Link, ModelShape, ReplicaKind, TrainingPart, TrainingPlan, WorkloadSpec
from rollover.errors import PlanError
from rollover.planner import columns
from rollover.planner.explain import why_infeasible
from rollover.planner.milp import solve
from rollover.planner.placement import Pipeline, Placement, place
from rollover.planner.plan import Plan, PlanningRound
from rollover.planner.records import Fleet, Problem, Solution, Tail
from rollover.planner.recost import Recosted, recost
from rollover.planner.routing import Routing, routed
from rollover.planner.topology import Topology

SETTLED = 0.02
"""Relative change of a time below which the rounds end."""
MAX_ROUNDS = 5
_SHORT = 1e-3
"""Part of an asked-for rate that may be missing: the solver's tolerance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a plan is asked for, whatever the fleet."""

    model: ModelShape
    workload: WorkloadSpec
    max_staleness: int
    target_steps_per_s: float | None = None
    """The cheapest plan that reaches it; ``None``: the fastest."""
    tail: Tail = "soft"
    routing: Routing = "load"
    one_device: bool = False
    """Training on a single device."""
    metis: bool = False
    seed: int = 0

    def problem(self, fleet: Fleet, networks: Mapping[str, Link]) -> Problem:
        """Phase 1's, with all length buckets. ``networks``: links between nodes by device type, where they are other
        than the fleet says.

        Raises:
            PlanError: the model fits nowhere.
        """
        return columns.problem(
            _with_networks(fleet, networks),
            self.model,
            self.workload,
            max_staleness=self.max_staleness,
            target_steps_per_s=self.target_steps_per_s,
            tail=self.tail,
            one_device=self.one_device,
        )

    def routed(self, problem: Problem) -> Problem:
        return routed(problem, self.routing)


def best_of_rounds(question: Question, fleet: Fleet, networks: Mapping[str, Link], *, explain: bool = True) -> Plan:
    """The best plan found that may use every node; ``networks`` is what phase 1 assumes at first.

    Raises:
        PlanError: nothing satisfies the limits; where it is to ``explain``, the message says which stand in the way.
    """
    topology, model = Topology.of(fleet), question.model
    met: list[Problem] = []
    found: list[Plan] = []
    rounds: list[PlanningRound] = []
    seen = set()
    while len(rounds) < MAX_ROUNDS:
        problem = _with_placed(question.problem(fleet, networks), met)
        solution = solve(question.routed(problem))
        if solution is None:
            if found:
                break
            raise PlanError(why_infeasible(question.routed(problem)) if explain else "no plan keeps all limits")
        placement = place(topology, model, problem, solution, seed=question.seed, metis=question.metis)
        real = recost(topology, model, problem, solution, placement, question.routed)
        rounds.append(_round(solution, real))
        if real.solution is not None:
            proved = replace(real.solution, gap=solution.gap, solve_s=solution.solve_s)
            made = _plan(fleet, model, real, proved, placement, solution.active)
            found.append(replace(made, workload=question.workload, routing=question.routing))
        kind = (solution.plan.parts, tuple(solution.replicas[c] for c in solution.active))
        if rounds[-1].moved < SETTLED or kind in seen:
            break
        seen.add(kind)
        met.append(real.unrouted)
        networks = {**networks, **real.networks}
    if not found:
        raise PlanError(
            f"no plan keeps its limits on the links between these nodes ({len(rounds)} were tried);"
            " allow more staleness, a larger budget or a lower target, or widen the links"
        )
    return replace(min(found, key=rank), rounds=tuple(rounds))


def rank(plan: Plan) -> tuple[float, float]:
    """Least is best: the cheapest of those that reach the target, or the fastest."""
    target, rate = plan.problem.target_steps_per_s, plan.solution.steps_per_s
    if target is None:
        return -rate, plan.cost_per_hour or 0.0
    missing = max(0.0, target * (1 - _SHORT) - rate)
    return missing, plan.cost_per_hour or 0.0


def _plan(
    fleet: Fleet,
    model: ModelShape,
    real: Recosted,
    solution: Solution,
    placement: Placement,
    active: tuple[int, ...],
) -> Plan:
    """``active``: the columns of the phase-1 problem that ``real`` has kept, in order."""
    places = {c: index for index, c in enumerate(active)}
    replicas = tuple(Pipeline(member=places[r.member], stages=r.stages) for r in placement.replicas)
    return Plan(
        fleet=fleet,
        model=model,
        workload=real.problem.workload,
        routing="load",
        problem=real.problem,
        solution=solution,
        placement=replace(placement, replicas=replicas),
    )


def _round(assumed: Solution, real: Recosted) -> PlanningRound:
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
    """The problem with shapes as they were re-costed where they were placed last."""
    plans = {_shape(plan): plan for plan in problem.plans}
    columns = {_kind(column): column for column in problem.columns}
    for placed in met:
        plans |= {_shape(plan): plan for plan in placed.plans}
        columns |= {_kind(column): column for column in placed.columns}
    return replace(problem, plans=tuple(plans.values()), columns=tuple(columns.values()))


def _shape(plan: TrainingPlan) -> tuple[TrainingPart, ...]:
    return tuple(replace(part, share=1.0) for part in plan.parts)


def _kind(column: ReplicaKind) -> tuple[str, int, int, int]:
    return column.device, column.tp, column.pp, column.batch_cap


def _with_networks(fleet: Fleet, networks: Mapping[str, Link]) -> Fleet:
    """The fleet as phase 1 should see it."""
    nodes = [
        replace(node, device=replace(node.device, network=networks[node.device.name]))
        if node.device.name in networks
        else node
        for node in fleet.nodes
    ]
    return replace(fleet, nodes=tuple(nodes))
