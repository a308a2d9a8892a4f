"""Phase 2: a solution's pipelines and replicas on the fleet's own devices.

Every device of the solution is placed exactly once; what must share a node (tensor parallelism, and pipelines that fit
into one) does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from rollover.devices.costs.links import narrowest
from rollover.devices.costs.passes import batch_tokens, extra_passes
from rollover.devices.costs.records import ReplicaKind, TrainingPart, TrainingPlan
from rollover.devices.costs.rollout import ReplicaCosts, replica_costs, replica_kind
from rollover.devices.costs.training import trainer_costs, training_plan
from rollover.devices.records import BF16_BYTES, Device, Link, ModelShape, WorkloadSpec
from rollover.planner.arrangement import Demand, Shares, Traffic, arrange, compose
from rollover.planner.blocks import block
from rollover.planner.records import Fleet, Problem, Solution
from rollover.planner.solution import held
from rollover.planner.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Devices of one node that work on the same layers: a tensor-parallel group."""

    node: int
    """Index in the fleet's nodes."""
    devices: tuple[int, ...]
    """Device numbers within the node, as in ``CUDA_VISIBLE_DEVICES``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stages in the order of the layers: a replica, or one of a trainer's data-parallel pipelines."""

    member: int
    """Index of the training part in its plan, or of the replica's kind among the kinds in use."""
    stages: tuple[Stage, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(stage.node for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The places of all parts of a solution."""

    training: tuple[Pipeline, ...]
    replicas: tuple[Pipeline, ...]

    @property
    def training_nodes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(node for pipeline in self.training for node in pipeline.nodes))

    @property
    def rollout_nodes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(node for replica in self.replicas for node in replica.nodes))


def place(topology: Topology, model: ModelShape, problem: Problem, solution: Solution) -> Placement:
    """Choose the nodes of each role, then of each pipeline and replica. Raises ``PlanError`` if the nodes cannot hold
    it."""
    fleet, fabric = topology.fleet, topology.fabric()
    demands = {device.name: _demand(device, problem, solution) for device in fleet.devices}
    traffic = step_traffic(fleet, model, problem.workload, solution.plan)
    shares = compose(fabric, demands, inside=problem.inside)
    arranged = arrange(fabric, shares, traffic)
    return _Assigner(topology, problem, solution, arranged).placement()


def _demand(device: Device, problem: Problem, solution: Solution) -> Demand:
    blocks: dict[int, int] = {}
    for c in solution.active:
        kind = problem.replica_kinds[c]
        if kind.device == device.name:
            size = block(kind, device.node_size)
            blocks[size] = blocks.get(size, 0) + solution.replicas[c] * kind.num_devices // size
    part = next((part for part in solution.plan.parts if part.device == device.name), None)
    if part is None:
        return Demand(replica_blocks=blocks)
    return Demand(train_devices=part.num_devices, train_block=block(part, device.node_size), replica_blocks=blocks)


def step_traffic(fleet: Fleet, model: ModelShape, workload: WorkloadSpec, plan: TrainingPlan) -> Traffic:
    """Return the bytes that a training step moves: gradients or gathered weights, activations between stages, and the
    new weights."""
    weights = BF16_BYTES * model.parameters
    train = 0.0
    for part in plan.parts:
        trainer = trainer_costs(model, workload, fleet.by_name[part.device], part)
        rounds = max(1.0, trainer.num_micro_batches * part.share / part.dp)
        exchanged = (3 + extra_passes(workload)) * rounds if part.sharded else 2.0
        train += exchanged * weights * (part.dp > 1)
        hidden = batch_tokens(workload) * part.share * model.hidden * BF16_BYTES
        train += 2 * (part.pp - 1) * hidden
    train += 2 * weights * (len(plan.parts) > 1)
    return Traffic(train=train, sync=workload.rollout_weight_bytes * model.parameters)


class _Assigner:
    """Hands out the devices of each node, role by role, the largest blocks first."""

    def __init__(self, topology: Topology, problem: Problem, solution: Solution, shares: Sequence[Shares]) -> None:
        self.topology = topology
        self.problem = problem
        self.solution = solution
        self.nodes = topology.fleet.nodes
        self.train = {i: list(range(s.train)) for i, s in enumerate(shares)}
        self.rollout = {i: list(range(s.rollout)) for i, s in enumerate(shares)}
        for i, s in enumerate(shares):
            if s.train:  # both roles keep neighbouring devices: the other one counts from the end
                self.rollout[i] = [self.nodes[i].num_devices - 1 - device for device in range(s.rollout)]

    def placement(self) -> Placement:
        plan, devices = self.solution.plan, self.topology.fleet.by_name
        training = [
            pipeline
            for member, part in enumerate(plan.parts)
            for pipeline in self._pipelines(self.train, member, part, part.dp)
        ]
        kinds = [(self.problem.replica_kinds[c], self.solution.replicas[c]) for c in self.solution.active]
        replicas = [
            pipeline
            for i in sorted(range(len(kinds)), key=lambda i: -block(kinds[i][0], devices[kinds[i][0].device].node_size))
            for pipeline in self._pipelines(self.rollout, i, *kinds[i])
        ]
        return Placement(training=tuple(training), replicas=tuple(replicas))

    def _pipelines(
        self, room: dict[int, list[int]], member: int, shape: TrainingPart | ReplicaKind, count: int
    ) -> Iterator[Pipeline]:
        """Yield ``count`` pipelines on the nodes of a type. Stages follow one another along a chain of wide links."""
        nodes = [i for i, node in enumerate(self.nodes) if node.device.name == shape.device and room[i]]
        size, tp, pp = block(shape, self.nodes[nodes[0]].device.node_size), shape.tp, shape.pp
        stages: list[Stage] = []
        for node in self.topology.chain(nodes):
            while len(room[node]) >= size and len(stages) < count * pp:
                taken, room[node][:] = room[node][:size], room[node][size:]
                stages += [Stage(node=node, devices=tuple(sorted(taken[k : k + tp]))) for k in range(0, size, tp)]
        assert len(stages) == count * pp, "shares hold what they were composed for"
        for k in range(0, len(stages), pp):
            yield Pipeline(member=member, stages=tuple(stages[k : k + pp]))


def rings(pipelines: Sequence[Pipeline]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of nodes that are next to each other in the data-parallel rings, one ring for each stage."""
    for stage in zip(*(pipeline.nodes for pipeline in pipelines), strict=True):
        nodes = list(dict.fromkeys(stage))
        yield from zip(nodes, [*nodes[1:], nodes[0]], strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSolution:
    """A placed solution at its real costs."""

    problem: Problem
    """The problem with only the solution's kinds and its training plan."""
    solution: Solution | None
    """The solution at real costs; ``None`` if it no longer keeps the problem's limits."""
    networks: dict[str, Link]
    """By device type, the link between nodes that a plan of this kind should have assumed."""


def costed_on_links(
    topology: Topology, model: ModelShape, problem: Problem, solution: Solution, placement: Placement
) -> PlacedSolution:
    """Compute the costs of the solution's kinds of replica and of its training plan at the links of ``placement``, and
    find their rate."""
    ways = weight_ways(topology, solution.plan, placement, placement.rollout_nodes)
    plan, joints = _training(topology, model, problem.workload, solution.plan, placement, ways)
    kinds = []
    for i, c in enumerate(solution.active):
        kind, replicas = problem.replica_kinds[c], [r for r in placement.replicas if r.member == i]
        engine = engine_on_links(topology, model, problem.workload, kind, replicas)
        kinds.append(replica_kind(engine, kind.batch_cap, weights_link(engine.device, replicas, ways)))
    used = replace(problem, replica_kinds=tuple(kinds), plans=(plan,))
    counts = [solution.replicas[c] for c in solution.active]
    return PlacedSolution(problem=used, solution=held(used, counts), networks=_networks(topology, ways, joints))


def engine_on_links(
    topology: Topology, model: ModelShape, workload: WorkloadSpec, kind: ReplicaKind, replicas: Sequence[Pipeline]
) -> ReplicaCosts:
    """Return the costs of ``replicas`` of one kind, whose stages hand over on the narrowest link that any of them
    uses."""
    device = topology.fleet.by_name[kind.device]
    link = _stage_link(topology, replicas) or device.link
    return replica_costs(model, workload, device, kind.tp, kind.pp, stage_link=link)


def weight_ways(
    topology: Topology, plan: TrainingPlan, placement: Placement, nodes: Sequence[int]
) -> dict[int, Link | None]:
    """Return for each of ``nodes`` the narrowest link on the way of new weights to it; ``None`` for a node that trains
    a whole copy. Shards on several nodes, or stages, are pieces that the nodes which train must fetch from each
    other."""
    whole: set[int] = set()
    for member, part in enumerate(plan.parts):
        homes = [{*p.nodes} for p in placement.training if p.member == member]
        copies = [set().union(*homes)] if part.sharded else homes
        whole |= {node for home in copies if len(home) == 1 for node in home}
    if whole:
        return topology.broadcast(sorted(whole), nodes)
    ways = topology.broadcast(placement.training_nodes, nodes)
    return {n: way or topology.narrowest(product([n], placement.training_nodes)) for n, way in ways.items()}


def weights_link(device: Device, replicas: Sequence[Pipeline], ways: Mapping[int, Link | None]) -> Link:
    """Return the narrowest link over which new weights reach ``replicas``; ``ways`` are ``weight_ways``."""
    return narrowest(ways[node] for r in replicas for node in r.nodes) or device.link


def _stage_link(topology: Topology, pipelines: Sequence[Pipeline]) -> Link | None:
    """Return the narrowest link over which a stage of ``pipelines`` hands over to the next; ``None`` if none leaves
    its node."""
    return topology.narrowest(pair for p in pipelines for pair in pairwise(p.nodes))


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
    sync_link = narrowest(ways.values()) or trainers[0].device.link
    across = _across(topology, placement, len(plan.parts))
    return training_plan(tuple(trainers), sync_link=sync_link, across=across), joints


def _across(topology: Topology, placement: Placement, num_parts: int) -> Link | None:
    """Return the narrowest link of the ring in which the parts of a trainer sum their gradients. Of two parts, the
    pipelines with the widest links between stages of the same layers exchange them."""
    nodes = [dict.fromkeys(p.nodes for p in placement.training if p.member == member) for member in range(num_parts)]

    def width(link: Link) -> float:
        return link.bytes_per_s

    def between(a: tuple[int, ...], b: tuple[int, ...]) -> Link:
        stages = max(len(a), len(b))
        pairs = ((a[k * len(a) // stages], b[k * len(b) // stages]) for k in range(stages))
        return min((topology.link(*pair) for pair in pairs), key=width)

    return narrowest(
        max((between(a, b) for a, b in product(one, other)), key=width)
        for one, other in zip(nodes, [*nodes[1:], nodes[0]], strict=True)
        if one is not other
    )


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
