"""The costs of a placed plan on the links it really uses.

Phase 1 knows each node's network but not which nodes communicate; here each time is recomputed at the narrowest link of
its collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rollover.devices.costs.links import narrowest
from rollover.devices.costs.records import ReplicaKind, TrainingPlan
from rollover.devices.costs.rollout import ReplicaCosts, replica_costs, replica_kind
from rollover.devices.costs.training import trainer_costs, training_plan
from rollover.devices.records import Device, Link, ModelShape, WorkloadSpec
from rollover.planner.placement import Pipeline, Placement, neighbours, rings
from rollover.planner.records import Problem, Solution
from rollover.planner.routing import Routing, routed
from rollover.planner.solution import held
from rollover.planner.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSolution:
    """A placed solution at its real costs.

    Example: a trainer that phase 1 took for 30 s a step has ``problem.plans[0].step_s == 34.0`` over a narrow link.
    """

    problem: Problem
    """The problem with only the solution's kinds and its training plan."""
    unrouted: Problem
    """The same problem with all length buckets."""
    solution: Solution | None
    """The solution at real costs; ``None`` if it no longer keeps the problem's limits."""
    networks: dict[str, Link]
    """By device type, the link between nodes that a plan of this kind should have assumed."""


def costed_on_links(
    topology: Topology,
    model: ModelShape,
    problem: Problem,
    solution: Solution,
    placement: Placement,
    routing: Routing,
) -> PlacedSolution:
    """Compute the costs of the solution's kinds of replica and of its training plan at the links of ``placement``, and
    find their rate.

    ``problem`` has all length buckets; ``solution`` solves it under ``routing``.
    """
    ways = topology.broadcast(placement.training_nodes, placement.rollout_nodes)
    plan, joints = _training(topology, model, problem.workload, solution.plan, placement, ways)
    kinds = []
    for c in solution.active:
        kind, replicas = problem.replica_kinds[c], [r for r in placement.replicas if r.member == c]
        engine = engine_on_links(topology, model, problem.workload, kind, replicas)
        kinds.append(replica_kind(engine, kind.batch_cap, weights_link(engine.device, replicas, ways)))
    unrouted = replace(problem, replica_kinds=tuple(kinds), plans=(plan,), mixtures=())
    used = routed(unrouted, routing)
    counts = [solution.replicas[c] for c in solution.active]
    networks = _networks(topology, ways, joints)
    return PlacedSolution(problem=used, unrouted=unrouted, solution=held(used, counts), networks=networks)


def engine_on_links(
    topology: Topology, model: ModelShape, workload: WorkloadSpec, kind: ReplicaKind, replicas: Sequence[Pipeline]
) -> ReplicaCosts:
    """Return the costs of ``replicas`` of one kind, whose stages hand over on the narrowest link that any of them
    uses."""
    device = topology.fleet.by_name[kind.device]
    link = _stage_link(topology, replicas) or device.link
    return replica_costs(model, workload, device, kind.tp, kind.pp, stage_link=link)


def weights_link(device: Device, replicas: Sequence[Pipeline], ways: Mapping[int, Link | None]) -> Link:
    """Return the narrowest link over which new weights reach ``replicas``; ``ways`` is ``Topology.broadcast``."""
    return narrowest(ways[node] for r in replicas for node in r.nodes) or device.link


def _stage_link(topology: Topology, pipelines: Sequence[Pipeline]) -> Link | None:
    """Return the narrowest link over which a stage of ``pipelines`` hands over to the next; ``None`` where none leaves
    its node."""
    return topology.narrowest(pair for pipeline in pipelines for pair in neighbours(pipeline))


def _training(
    topology: Topology,
    model: ModelShape,
    workload: WorkloadSpec,
    plan: TrainingPlan,
    placement: Placement,
    ways: Mapping[int, Link | None],
) -> tuple[TrainingPlan, dict[str, Link]]:
    """Return the plan costed on its real links and, by device, the narrowest link among its pipelines."""
    trainers, joints = [], {}
    for member, part in enumerate(plan.parts):
        device = topology.fleet.by_name[part.device]
        pipelines = [p for p in placement.training if p.member == member]
        ring, hand_over = topology.narrowest(rings(pipelines)), _stage_link(topology, pipelines)
        if ring is not None:
            # Pipelines on several nodes reduce their gradients between nodes, be they few enough for one.
            device = replace(device, node_size=min(device.node_size, part.tp * part.pp))
        found = narrowest((ring, hand_over))
        if found is not None:
            joints[part.device] = found
        stage_link = hand_over or device.link
        trainers.append(trainer_costs(model, workload, device, part, ring_link=ring, stage_link=stage_link))
    # On shared nodes alone, weights travel inside.
    return training_plan(tuple(trainers), narrowest(ways.values()) or trainers[0].device.link), joints


def _networks(topology: Topology, ways: Mapping[int, Link | None], joints: Mapping[str, Link]) -> dict[str, Link]:
    """Return the narrowest link that each type met between nodes: in its pipelines, or on the way of the weights to
    it."""
    found = dict(joints)
    for node, way in ways.items():
        name = topology.fleet.nodes[node].device.name
        narrower = narrowest((found.get(name), way))
        if narrower is not None:
            found[name] = narrower
    return found
