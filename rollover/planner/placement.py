"""Phase 2: a solution's pipelines and replicas on the fleet's own devices.

Every device of the solution is placed exactly once; what must share a node (tensor parallelism, and pipelines that fit
into one) does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rollover.devices.costs.passes import batch_tokens, extra_passes
from rollover.devices.costs.records import ReplicaKind, TrainingPart, TrainingPlan
from rollover.devices.costs.training import trainer_costs
from rollover.devices.records import BF16_BYTES, Device, ModelShape, WorkloadSpec
from rollover.planner.arrangement import arrange, metis_order
from rollover.planner.composition import compose
from rollover.planner.fabric import Demand, Shares, Traffic
from rollover.planner.records import Fleet, Problem, Solution
from rollover.planner.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Devices of one node that work on the same layers: a tensor-parallel group.

    Example: ``Stage(node=2, devices=(4, 5, 6, 7))`` is a tensor-parallel group of 4 on half of a node of 8.
    """

    node: int
    """Index in the fleet's nodes."""
    devices: tuple[int, ...]
    """Device numbers within the node, as in ``CUDA_VISIBLE_DEVICES``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stages in the order of the layers: a replica, or one of a trainer's data-parallel pipelines.

    Example: ``Pipeline(member=0, stages=(Stage(node=0, devices=(0, 1)), Stage(node=1, devices=(0, 1))))`` runs the
    first half of the layers on node 0 and the second on node 1.
    """

    member: int
    """Index of the training part in its plan, or of the replica's kind in its problem."""
    stages: tuple[Stage, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(stage.node for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The places of all parts of a solution.

    Example: the placement of a trainer with dp 2 and of three replicas has 2 pipelines in ``training`` and 3 in
    ``replicas``.
    """

    training: tuple[Pipeline, ...]
    replicas: tuple[Pipeline, ...]

    @property
    def training_nodes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(node for pipeline in self.training for node in pipeline.nodes))

    @property
    def rollout_nodes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(node for replica in self.replicas for node in replica.nodes))


def place(
    topology: Topology, model: ModelShape, problem: Problem, solution: Solution, *, metis: bool = False
) -> Placement:
    """Choose the nodes of each role, then of each pipeline and replica.

    Raises:
        PlanError: the nodes cannot hold it.
    """
    fleet, fabric = topology.fleet, topology.fabric()
    demands = {device.name: _demand(device, problem, solution) for device in fleet.devices}
    traffic = step_traffic(fleet, model, problem.workload, solution.plan)
    shares = compose(fabric, demands)
    first = metis_order(fabric, shares) if metis else None
    arranged = arrange(fabric, shares, traffic, first=first)
    return _Assigner(topology, problem, solution, arranged).placement()


def _block(device: Device, shape: TrainingPart | ReplicaKind) -> int:
    """Return the number of devices that are kept on one node: a whole pipeline where nodes hold a whole number of them,
    else a stage."""
    size = shape.tp * shape.pp
    return size if device.node_size % size == 0 else shape.tp


def _demand(device: Device, problem: Problem, solution: Solution) -> Demand:
    blocks: dict[int, int] = {}
    for c in solution.active:
        kind = problem.replica_kinds[c]
        if kind.device == device.name:
            block = _block(device, kind)
            blocks[block] = blocks.get(block, 0) + solution.replicas[c] * kind.num_devices // block
    part = next((part for part in solution.plan.parts if part.device == device.name), None)
    if part is None:
        return Demand(replica_blocks=blocks)
    return Demand(train_devices=part.num_devices, train_block=_block(device, part), replica_blocks=blocks)


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
        kinds = {c: self.problem.replica_kinds[c] for c in self.solution.active}
        replicas = [
            pipeline
            for c in sorted(kinds, key=lambda c: (-_block(devices[kinds[c].device], kinds[c]), c))
            for pipeline in self._pipelines(self.rollout, c, kinds[c], self.solution.replicas[c])
        ]
        return Placement(training=tuple(training), replicas=tuple(replicas))

    def _pipelines(
        self, room: dict[int, list[int]], member: int, shape: TrainingPart | ReplicaKind, count: int
    ) -> Iterator[Pipeline]:
        """Yield ``count`` pipelines on the nodes of a type. Stages follow one another along a chain of wide links."""
        nodes = [i for i, node in enumerate(self.nodes) if node.device.name == shape.device and room[i]]
        block, tp, pp = _block(self.nodes[nodes[0]].device, shape), shape.tp, shape.pp
        stages: list[Stage] = []
        for node in self.topology.chain(nodes):
            while len(room[node]) >= block and len(stages) < count * pp:
                taken, room[node][:] = room[node][:block], room[node][block:]
                stages += [Stage(node=node, devices=tuple(sorted(taken[k : k + tp]))) for k in range(0, block, tp)]
        assert len(stages) == count * pp, "shares hold what they were composed for"
        for k in range(0, len(stages), pp):
            yield Pipeline(member=member, stages=tuple(stages[k : k + pp]))


def neighbours(pipeline: Pipeline) -> Iterable[tuple[int, int]]:
    """Return the pairs of nodes between which a pipeline's stages hand over."""
    return zip(pipeline.nodes, pipeline.nodes[1:], strict=False)


def rings(pipelines: Sequence[Pipeline]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of nodes that are next to each other in the data-parallel rings, one ring for each stage."""
    for stage in zip(*(pipeline.nodes for pipeline in pipelines), strict=True):
        nodes = list(dict.fromkeys(stage))
        yield from zip(nodes, [*nodes[1:], nodes[0]], strict=True)
