"""Choices for a plan: parallel shapes, kinds of rollout replica and training plans that fit into memory,
without any plan that another matches or beats.

Leaving out a dominated choice never changes the optimum: wherever it stands, the better one could.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, groupby, product
from operator import attrgetter

from rollover.devices.costs.links import narrowest
from rollover.devices.costs.passes import longest_tokens
from rollover.devices.costs.records import ReplicaKind, TrainingPart, TrainingPlan
from rollover.devices.costs.rollout import ReplicaCosts, replica_costs, replica_kind
from rollover.devices.costs.training import TrainerCosts, trainer_costs, training_plan
from rollover.devices.records import Device, Link, ModelShape, WorkloadSpec
from rollover.planner.blocks import block, block_size, in_blocks, powers
from rollover.planner.records import Server
from rollover.trainer.parallelism import unsupported

MAX_TRAINING_STAGES = 64
"""Maximum number of pipeline stages of a training plan."""
MAX_REPLICA_STAGES = 4
"""Maximum number of pipeline stages of a replica."""
MAX_BATCH = 1024
"""Maximum number of samples that an engine decodes at once."""
_CAPS = (4, 8, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512, 724)
"""Batch caps to choose from."""
_MIXED_SIZES = {2: 16, 3: 4}
"""Number of sizes of each type from which training plans over so many types are put together."""


_remembered = lru_cache(maxsize=256)
"""Keeps the choices of a device type: the parts of a fleet for which problems are built share most of them."""


def _shapes(device: Device, model: ModelShape, max_stages: int) -> Iterator[tuple[int, int]]:
    """Yield (tensor parallel, pipeline parallel) sizes: powers of two of which the first divides the heads and fits
    into a node."""
    widths = [n for n in powers(device.node_size) if model.num_heads % n == 0]
    return product(widths, powers(min(max_stages, model.num_layers)))


def _copies(tp: int, pp: int, device: Device, node_sizes: Sequence[int]) -> int:
    """Return the number of pipelines that nodes of these sizes hold."""
    return in_blocks(block_size(tp, pp, device.node_size), tuple(node_sizes)) // (tp * pp)


# --- Kinds of replica -------------------------------------------------------------------------------------------------


def replica_kinds(
    device: Device, node_sizes: Sequence[int], model: ModelShape, workload: WorkloadSpec
) -> list[ReplicaKind]:
    """Return all kinds of replica that nodes of these sizes hold."""
    found: list[ReplicaKind] = []
    for tp, pp in _shapes(device, model, MAX_REPLICA_STAGES):
        engine = replica_costs(model, workload, device, tp, pp)
        if _copies(tp, pp, device, node_sizes) and engine.fits():
            found += _at_caps(engine, _CAPS)
    return found


def _at_caps(engine: ReplicaCosts, caps: Iterable[int]) -> list[ReplicaKind]:
    """Return the kinds with the largest batch cap that its memory can hold, and with those of ``caps`` under it."""
    most = max(engine.batch(bucket, MAX_BATCH) for bucket in engine.workload.buckets)
    return [replica_kind(engine, cap) for cap in sorted({most, *(cap for cap in caps if 0 < cap < most)})]


def finer(kind: ReplicaKind, device: Device, model: ModelShape, workload: WorkloadSpec) -> list[ReplicaKind]:
    """Return kinds like ``kind`` with batch caps near its own, in steps of 9%. Weights reach them as soon as ``kind``,
    which may have been placed."""
    engine = replica_costs(model, workload, device, kind.tp, kind.pp)
    sooner_s = kind.update_s - replica_kind(engine, kind.batch_cap).update_s
    found = _at_caps(engine, [round(kind.batch_cap * 2 ** (eighths / 8)) for eighths in range(-4, 5)])
    return [replace(fine, update_s=fine.update_s + sooner_s) for fine in found]


@_remembered
def undominated_kinds(
    device: Device, node_sizes: tuple[int, ...], model: ModelShape, workload: WorkloadSpec
) -> tuple[ReplicaKind, ...]:
    """Return the kinds of ``replica_kinds`` without those that a whole number of another kind's replicas can replace:
    with as many devices in no larger blocks, at least as fast, with at least as much cache and no later."""
    kept: list[ReplicaKind] = []
    kinds = replica_kinds(device, node_sizes, model, workload)
    for kind in sorted(kinds, key=lambda c: (c.num_devices, c.latency_s, c.tp)):
        if not any(_replaces(other, kind, workload, device.node_size) for other in kept):
            kept.append(kind)
    return tuple(kept)


_DELAYS = attrgetter("latency_s", "group_latency_s", "batch_latency_s", "max_latency_s", "update_s")


def _replaces(other: ReplicaKind, kind: ReplicaKind, workload: WorkloadSpec, node_size: int) -> bool:
    copies, rest = divmod(kind.num_devices, other.num_devices)
    if rest or block(other, node_size) > block(kind, node_size):
        return False
    return (
        copies * other.rate >= kind.rate
        and all(a <= b for a, b in zip(_DELAYS(other), _DELAYS(kind), strict=True))
        and (not workload.held_s or other.kv_byte_s / other.kv_bytes / copies <= kind.kv_byte_s / kind.kv_bytes)
    )


# --- Training plans ---------------------------------------------------------------------------------------------------


def training_plans(
    stock: dict[Device, int],
    model: ModelShape,
    workload: WorkloadSpec,
    *,
    node_sizes: Mapping[str, tuple[int, ...]],
    across: Mapping[tuple[str, str], Link],
    inside: Mapping[str, int],
    launchable: bool = False,
) -> list[TrainingPlan]:
    """Return the Pareto-optimal plans (devices of each type, cycle time) over one type, and those over two and three
    types that are put together from the fastest ones of each type (see ``_sizes``).

    Args:
        node_sizes: number of devices of each node of a type.
        across: links between types, if they are not the narrower of two networks.
        inside: number of nodes of each type that must train a whole copy in each of its nodes.
        launchable: return only plans over one type that the trainer can run.
    """
    apart = len(inside) == len(stock)
    fastest = {
        device: _fastest_trainers(
            device, node_sizes[device.name], model, workload, inside.get(device.name, 0), apart, launchable
        )
        for device in stock
    }
    alone = {
        device: [training_plan((trainer,)) for trainer in found] if {*inside} <= {device.name} else []
        for device, found in fastest.items()
    }
    plans = [plan for found in alone.values() for plan in found]
    usable = [device for device, found in fastest.items() if found]
    for size in () if launchable else (2, 3):
        for types in combinations(usable, size):
            names = [device.name for device in types]
            if not {*inside} <= {*names}:
                continue
            link = narrowest(across.get(pair) for pair in zip(names, [*names[1:], names[0]], strict=True))
            begun = product(*(_sizes(fastest[device], stock[device], _MIXED_SIZES[size]) for device in types))
            others = [plan for device in types for plan in alone[device]]
            plans += _pareto([training_plan(parts, across=link) for parts in begun], others)
    return plans


def runs(part: TrainingPart) -> bool:
    """Return whether this version's trainer divides its work like ``part``."""
    return unsupported(dp=part.dp, tp=part.tp, pp=part.pp, sharded=part.sharded) is None


@_remembered
def _fastest_trainers(
    device: Device,
    node_sizes: tuple[int, ...],
    model: ModelShape,
    workload: WorkloadSpec,
    nodes: int,
    no_rollout_apart: bool,
    launchable: bool,
) -> list[TrainerCosts]:
    """Keep the fastest trainer for each number of devices, where more devices are faster, and slower ones in smaller
    blocks where nodes cannot be divided into larger ones."""
    best: list[TrainerCosts] = []
    found = _trainers(device, node_sizes, model, workload, nodes, no_rollout_apart)
    usable = [trainer for trainer in found if not launchable or runs(trainer.part)]
    for _, same in groupby(usable, key=lambda t: t.part.num_devices):
        for trainer in sorted(same, key=_alone_s):
            if not any(_alone_s(t) <= _alone_s(trainer) and _packs(t, trainer) for t in best):
                best.append(trainer)
    return best


def _trainers(
    device: Device,
    node_sizes: Sequence[int],
    model: ModelShape,
    workload: WorkloadSpec,
    nodes: int,
    no_rollout_apart: bool,
) -> list[TrainerCosts]:
    """Return the trainers of all shapes that fit into memory and nodes. If ``nodes`` is not 0, each of so many nodes
    trains a whole copy; with ``no_rollout_apart``, new weights need not leave them."""
    found, home = [], replace(device, network=device.link) if no_rollout_apart else device
    for tp, pp in _shapes(device, model, MAX_TRAINING_STAGES):
        for dp, sharded, recompute in product(
            range(1, min(_copies(tp, pp, device, node_sizes), workload.batch_size) + 1), (False, True), (False, True)
        ):
            if nodes and (dp < nodes or tp * pp > device.node_size or (sharded and nodes > 1)):
                continue
            part = TrainingPart(
                device=device.name, dp=dp, tp=tp, pp=pp, sharded=sharded, recompute=recompute, share=1.0
            )
            apart = replace(home, node_size=tp * pp) if nodes > 1 else home
            trainer = trainer_costs(model, workload, apart, part, ring_link=device.network)
            if (dp > 1 or not sharded) and trainer.fits():
                found.append(trainer)
    return sorted(found, key=lambda t: (t.part.num_devices, t.cost.batch_s, t.cost.fixed_s))


def _packs(trainer: TrainerCosts, other: TrainerCosts) -> bool:
    """Return whether nodes that have room for the blocks of ``other`` also have room for the blocks of ``trainer``."""
    node_size = trainer.device.node_size
    even = node_size & (node_size - 1) == 0
    return even or block(trainer.part, node_size) <= block(other.part, node_size)


def _alone_s(trainer: TrainerCosts) -> float:
    return trainer.cost.batch_s + trainer.cost.fixed_s


def _sizes(trainers: Sequence[TrainerCosts], count: int, most: int) -> Sequence[TrainerCosts]:
    """Return up to ``most`` trainers: all, or if there are more, the largest for the stock, for half of it, and so
    on."""
    if len(trainers) <= most:
        return trainers
    chosen = []
    for _ in range(most):
        fitting = [trainer for trainer in trainers if trainer.part.num_devices <= count]
        if not fitting:
            break
        chosen.append(fitting[-1])
        count = fitting[-1].part.num_devices // 2
    return chosen


def _pareto(plans: list[TrainingPlan], others: list[TrainingPlan]) -> list[TrainingPlan]:
    """Keep the plans that really share a batch, without those that another of ``plans`` or ``others`` beats with no
    more devices of any type; ties go to the first."""
    kept: list[TrainingPlan] = []
    for plan in sorted(plans, key=lambda p: (p.cycle_s, p.num_devices)):
        quicker = [other for other in others if other.cycle_s <= plan.cycle_s]
        if all(part.share > 0 for part in plan.parts) and not any(_within(o, plan) for o in (*kept, *quicker)):
            kept.append(plan)
    return kept


def _within(other: TrainingPlan, plan: TrainingPlan) -> bool:
    return all(plan.count(part.device) >= part.num_devices for part in other.parts)


# --- Where nothing fits -----------------------------------------------------------------------------------------------


def no_room(
    stock: dict[Device, int],
    node_sizes: Mapping[str, Sequence[int]],
    model: ModelShape,
    workload: WorkloadSpec,
    act: str,
    launchable: Server | None,
) -> str:
    """Say how much memory each device type would need, in the shape that needs least, and how much it has."""
    within = " in shapes that rollover launch can run (--for-launch)" if launchable else ""
    lines = [
        f"{model.name} ({model.parameters / 1e9:.1f}B parameters) cannot {act} on any device of this fleet{within}:"
    ]
    for device in stock:
        needs, has = {}, device.efficiency.memory * device.hbm_bytes
        for tp, pp in _shapes(device, model, MAX_TRAINING_STAGES if act == "train" else MAX_REPLICA_STAGES):
            if dp := min(_copies(tp, pp, device, node_sizes[device.name]), workload.batch_size):
                part = TrainingPart(device=device.name, dp=dp, tp=tp, pp=pp, sharded=True, recompute=True, share=1.0)
                largest = 1 if launchable == "embedded_server" else device.node_size
                if launchable and (tp * pp > largest if act == "roll out" else not runs(part)):
                    continue
                engine = replica_costs(model, workload, device, tp, pp)
                left = engine.kv_room - engine.kv_bytes_per_token * longest_tokens(workload)
                trains = trainer_costs(model, workload, device, part).memory_bytes
                needs[f"tp {tp} x pp {pp}"] = trains if act == "train" else has - left / (tp * pp)
        lines.append(
            f"  {device.name}: {min(needs.values()) / 2**30:.1f} GiB per device needed even with"
            f" {min(needs, key=needs.__getitem__)}, {has / 2**30:.1f} of {device.hbm_bytes / 2**30:.1f} GiB usable"
        )
    lines.append("add devices of one type, or use devices with more memory, a smaller model or shorter responses")
    return "\n".join(lines)
