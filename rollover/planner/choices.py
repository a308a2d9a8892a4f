"""Choices for a plan: parallel shapes, kinds of rollout replica and training plans that fit into memory,
without those that another is at least as good as.

Leaving out a dominated choice never changes the optimum: wherever it stands, the better one could.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, groupby, product

from rollover.devices.costs.passes import longest_tokens
from rollover.devices.costs.records import Mixture, PartCost, ReplicaKind, TrainingPart, TrainingPlan
from rollover.devices.costs.rollout import ReplicaCosts, replica_costs, replica_kind
from rollover.devices.costs.training import TrainerCosts, trainer_costs, training_mixture, training_plan
from rollover.devices.records import Device, Link, ModelShape, WorkloadSpec
from rollover.trainer.parallelism import unsupported

MAX_TRAINING_STAGES = 64
"""Maximum number of pipeline stages of a training plan."""
MAX_REPLICA_STAGES = 4
"""Maximum number of pipeline stages of a replica."""
MAX_BATCH = 1024
"""Maximum number of samples that an engine decodes at once."""
_MIXED_SIZES = 6
"""Sizes, by halving the stock, from which the first training plans over two types are put together."""


def _shapes(device: Device, model: ModelShape, max_stages: int) -> Iterator[tuple[int, int]]:
    """Yield (tensor parallel, pipeline parallel) sizes.

    Tensor parallel sizes divide the heads and, so that replicas pack without gaps, the node.
    """
    widths = [n for n in _powers(device.node_size) if device.node_size % n == 0 and model.num_heads % n == 0]
    return product(widths, _powers(min(max_stages, model.num_layers)))


def _powers(largest: int) -> list[int]:
    """List the powers of two up to ``largest``."""
    return [1 << i for i in range(largest.bit_length())]


# --- Kinds of replica -------------------------------------------------------------------------------------------------


def replica_kinds(device: Device, count: int, model: ModelShape, workload: WorkloadSpec) -> list[ReplicaKind]:
    """Return the undominated kinds of replica of up to ``count`` devices."""
    found = [
        replica_kind(engine, cap)
        for engine in _engines(device, count, model, workload)
        for cap in _caps(max(engine.batch(bucket, MAX_BATCH) for bucket in workload.buckets))
    ]
    return undominated(found, workload)


def _engines(device: Device, count: int, model: ModelShape, workload: WorkloadSpec) -> Iterator[ReplicaCosts]:
    for tp, pp in _shapes(device, model, MAX_REPLICA_STAGES):
        engine = replica_costs(model, workload, device, tp, pp)
        if tp * pp <= count and engine.fits():
            yield engine


def _caps(largest: int) -> list[int]:
    """List the batch caps to choose from: the largest, and powers of two (of four below 16) under it."""
    return sorted({largest, *(c for c in (4, 16, 32, 64, 128, 256, 512) if c < largest)})


def undominated(kinds: Sequence[ReplicaKind], workload: WorkloadSpec) -> list[ReplicaKind]:
    """Drop the kinds that a whole number of another kind's replicas can replace: with as many devices, at least as fast
    for every bucket, with at least as much cache and no later. All kinds are of one device type."""
    kept: list[ReplicaKind] = []
    for kind in sorted(kinds, key=lambda c: (c.num_devices, c.latencies_s, c.tp)):
        if not any(_replaces(other, kind, workload) for other in kept):
            kept.append(kind)
    return kept


def _replaces(other: ReplicaKind, kind: ReplicaKind, workload: WorkloadSpec) -> bool:
    copies, rest = divmod(kind.num_devices, other.num_devices)
    if rest:
        return False
    return (
        all(copies * a >= b for a, b in zip(other.rates, kind.rates, strict=True))
        and _below(other.latencies_s, kind.latencies_s)
        and _below(other.updates_s, kind.updates_s)
        and (not workload.held_s or _below(_fill(other, copies), _fill(kind, 1)))
    )


def _below(low: Iterable[float], high: Iterable[float]) -> bool:
    return all(a <= b for a, b in zip(low, high, strict=True))


def _fill(kind: ReplicaKind, copies: int) -> list[float]:
    """Return, for each bucket, the fraction of the cache that one sample per second occupies."""
    return [held / kind.kv_bytes / copies for held in kind.kv_byte_s]


# --- Training plans ---------------------------------------------------------------------------------------------------


def training_plans(
    stock: dict[Device, int],
    model: ModelShape,
    workload: WorkloadSpec,
    *,
    across: Mapping[tuple[str, str], Link],
    launchable: bool = False,
) -> tuple[list[TrainingPlan], list[Mixture]]:
    """Return the Pareto-optimal plans (devices of each type, cycle time) over one type and a few over two to begin
    with, and the mixtures, which hold all plans over two types. ``across``: links between types, where they are not
    the narrower of two networks. With ``launchable``, return only plans over one type
    that the trainer can run."""
    choices = {device: _trainers(device, count, model, workload) for device, count in stock.items()}
    if launchable:
        choices = {device: [t for t in found if runs(t.part)] for device, found in choices.items()}
    fastest = {device: _fastest(found) for device, found in choices.items()}
    alone = {device: [training_plan((trainer,)) for trainer in found] for device, found in fastest.items()}
    plans = [plan for found in alone.values() for plan in found]
    mixtures: list[Mixture] = []
    if launchable:
        return plans, mixtures
    for a, b in combinations([device for device, found in choices.items() if found], 2):
        link = across.get((a.name, b.name))
        mixtures.append(training_mixture(_undominated(choices[a]), _undominated(choices[b]), link))
        begun = product(_sizes(fastest[a], stock[a]), _sizes(fastest[b], stock[b]))
        plans += _pareto([training_plan(pair, across=link) for pair in begun], [*alone[a], *alone[b]])
    return plans, mixtures


def runs(part: TrainingPart) -> bool:
    """Return whether this version's trainer divides its work like ``part``."""
    return unsupported(dp=part.dp, tp=part.tp, pp=part.pp, sharded=part.sharded) is None


def _trainers(device: Device, count: int, model: ModelShape, workload: WorkloadSpec) -> list[TrainerCosts]:
    """Return the trainers of all shapes that fit into memory and stock."""
    found = []
    for tp, pp in _shapes(device, model, MAX_TRAINING_STAGES):
        for dp, sharded, recompute in product(
            range(1, min(count // (tp * pp), workload.batch_size) + 1), (False, True), (False, True)
        ):
            part = TrainingPart(
                device=device.name, dp=dp, tp=tp, pp=pp, sharded=sharded, recompute=recompute, share=1.0
            )
            trainer = trainer_costs(model, workload, device, part)
            if (dp > 1 or not sharded) and trainer.fits():
                found.append(trainer)
    return sorted(found, key=lambda t: (t.part.num_devices, t.cost.batch_s, t.cost.fixed_s))


def _fastest(trainers: list[TrainerCosts]) -> list[TrainerCosts]:
    """Keep the fastest trainer for each number of devices, where more devices are faster."""
    best: list[TrainerCosts] = []
    for _, same in groupby(trainers, key=lambda t: t.part.num_devices):
        trainer = min(same, key=_alone_s)
        if not best or _alone_s(trainer) < _alone_s(best[-1]):
            best.append(trainer)
    return best


def _alone_s(trainer: TrainerCosts) -> float:
    return trainer.cost.batch_s + trainer.cost.fixed_s


def _undominated(trainers: list[TrainerCosts]) -> list[TrainerCosts]:
    """Drop the trainers that another one beats at any share of a batch with no more devices."""
    kept: list[TrainerCosts] = []
    front: list[PartCost] = []  # of those kept: slower per sample, and quicker to begin, one after the other
    for trainer in trainers:
        cost = trainer.cost
        if any(c.batch_s <= cost.batch_s and c.fixed_s <= cost.fixed_s for c in front):
            continue
        kept.append(trainer)
        front = [c for c in front if c.batch_s < cost.batch_s or c.fixed_s < cost.fixed_s] + [cost]
    return kept


def _sizes(trainers: list[TrainerCosts], count: int) -> list[TrainerCosts]:
    """Return the trainers that use most of the stock, of half of it, and so on."""
    chosen = []
    for _ in range(_MIXED_SIZES):
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


def no_room(stock: dict[Device, int], model: ModelShape, workload: WorkloadSpec, act: str) -> str:
    """Say how much memory each device type would need and how much it has, if the model fits nowhere."""
    lines = [f"{model.name} ({model.parameters / 1e9:.1f}B parameters) cannot {act} on any device of this fleet:"]
    for device, count in stock.items():
        if act == "train":
            needs, shape = _least_training_bytes(device, count, model, workload)
        else:
            needs, shape = _least_rollout_bytes(device, count, model, workload)
        has = device.efficiency.memory * device.hbm_bytes
        lines.append(
            f"  {device.name}: {needs / 2**30:.1f} GiB per device needed even with {shape}, "
            f"{has / 2**30:.1f} of {device.hbm_bytes / 2**30:.1f} GiB usable"
        )
    lines.append("add devices of one type, or use devices with more memory, a smaller model or shorter responses")
    return "\n".join(lines)


def _least_rollout_bytes(device: Device, count: int, model: ModelShape, workload: WorkloadSpec) -> tuple[float, str]:
    """Return what a device of the widest replica needs (weights and the longest sample's KV cache), and its shape."""
    widest = [(tp * pp, tp, pp) for tp, pp in _shapes(device, model, MAX_REPLICA_STAGES) if tp * pp <= count]
    size, tp, pp = max(widest)
    engine = replica_costs(model, workload, device, tp, pp)
    room = engine.kv_bytes_per_token * longest_tokens(workload)
    return (workload.rollout_weight_bytes * model.parameters + room) / size, f"tp {tp} x pp {pp}"


def _least_training_bytes(device: Device, count: int, model: ModelShape, workload: WorkloadSpec) -> tuple[float, str]:
    """Return what a device of the most divided plan needs, and its shape."""
    trainers = []
    for tp, pp in _shapes(device, model, MAX_TRAINING_STAGES):
        dp = min(count // (tp * pp), workload.batch_size)
        if dp:
            part = TrainingPart(device=device.name, dp=dp, tp=tp, pp=pp, sharded=True, recompute=True, share=1.0)
            trainers.append(trainer_costs(model, workload, device, part))
    least = min(trainers, key=lambda trainer: trainer.memory_bytes)
    part = least.part
    return least.memory_bytes, f"dp {part.dp} x tp {part.tp} x pp {part.pp}, sharded and recomputing"
