"""What the optimiser may choose from: rollout replicas and training plans that fit into memory, without those that
others are at least as good as.

Leaving out a dominated choice never changes the optimum: wherever it stands, the better one could.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby, product

from rollover.devices import costs
from rollover.devices.records import (
    Device,
    Mixture,
    ModelShape,
    ReplicaKind,
    TrainingPart,
    TrainingPlan,
    WorkloadSpec,
)
from rollover.errors import PlanError
from rollover.planner.records import Fleet, Problem, Supply, Tail

MAX_BATCH = 1024
"""Samples that an engine decodes at once, at most."""
MAX_STAGES = 64
"""Pipeline stages of a training plan, at most; a replica has up to ``MAX_REPLICA_STAGES``."""
MAX_REPLICA_STAGES = 4
_MIXED_SIZES = 6
"""Sizes, by halving the stock, from which the first training plans over two types are put together."""


def problem(
    fleet: Fleet,
    model: ModelShape,
    workload: WorkloadSpec,
    *,
    max_staleness: int,
    target_steps_per_s: float | None = None,
    tail: Tail = "none",
    one_device: bool = False,
) -> Problem:
    """The planning problem of a fleet; raises ``PlanError`` where the model fits nowhere. ``one_device``: the trainers
    of a single device alone."""
    stock = dict(zip(fleet.devices, fleet.stock, strict=True))
    built = of_stock(stock, model, workload, max_staleness=max_staleness, one_device=one_device)
    return replace(built, budget_per_hour=fleet.budget_per_hour, target_steps_per_s=target_steps_per_s, tail=tail)


def of_stock(
    stock: dict[Device, int], model: ModelShape, workload: WorkloadSpec, *, max_staleness: int, one_device: bool = False
) -> Problem:
    """The problem of so many devices of each type, without a budget."""
    if max_staleness < 0:
        raise PlanError(f"max_staleness must be zero or more, got {max_staleness}")
    columns = [c for device, n in stock.items() for c in rollout_columns(device, n, model, workload)]
    if not columns:
        raise PlanError(_no_room(stock, model, workload, "roll out"))
    trained = dict.fromkeys(stock, 1) if one_device else stock
    plans, mixtures = training_plans(trained, model, workload)
    if not plans:
        raise PlanError(_no_room(trained, model, workload, "train"))
    if one_device:
        plans, mixtures = [plan for plan in plans if plan.num_devices == 1], []
    return Problem(
        supplies=tuple(Supply(device=d.name, count=n, price_per_hour=d.price_per_hour) for d, n in stock.items()),
        columns=tuple(columns),
        plans=tuple(plans),
        mixtures=tuple(mixtures),
        workload=workload,
        max_staleness=max_staleness,
    )


# --- Rollout ----------------------------------------------------------------------------------------------------------


def rollout_columns(device: Device, count: int, model: ModelShape, workload: WorkloadSpec) -> list[ReplicaKind]:
    """Undominated replicas of up to ``count`` devices."""
    found = [
        costs.replica_kind(engine, cap)
        for engine in _engines(device, count, model, workload)
        for cap in _caps(max(engine.batch(bucket, MAX_BATCH) for bucket in workload.buckets))
    ]
    return undominated(found, workload)


def _engines(device: Device, count: int, model: ModelShape, workload: WorkloadSpec) -> Iterator[costs.ReplicaCosts]:
    for tp, pp in product(_tensor_sizes(device, model), _doublings(min(MAX_REPLICA_STAGES, model.num_layers))):
        engine = costs.replica(model, workload, device, tp, pp)
        if tp * pp <= count and engine.fits():
            yield engine


def _caps(largest: int) -> list[int]:
    """Batch caps to choose from: the largest, and powers of two (of four below 16) under it."""
    return sorted({largest, *(c for c in (4, 16, 32, 64, 128, 256, 512) if c < largest)})


def undominated(columns: Sequence[ReplicaKind], workload: WorkloadSpec) -> list[ReplicaKind]:
    """Columns of one device type without those that a whole number of some other's replicas replaces: at least as fast
    for every bucket, with at least as much cache and no later."""
    kept: list[ReplicaKind] = []
    for column in sorted(columns, key=lambda c: (c.num_devices, c.latencies_s, c.tp)):
        if not any(_replaces(other, column, workload) for other in kept):
            kept.append(column)
    return kept


def _replaces(other: ReplicaKind, column: ReplicaKind, workload: WorkloadSpec) -> bool:
    copies, rest = divmod(column.num_devices, other.num_devices)
    if rest:
        return False
    return (
        all(copies * a >= b for a, b in zip(other.rates, column.rates, strict=True))
        and _below(other.latencies_s, column.latencies_s)
        and _below(other.updates_s, column.updates_s)
        and (not workload.held_s or _below(_fill(other, copies), _fill(column, 1)))
    )


def _below(low: Iterable[float], high: Iterable[float]) -> bool:
    return all(a <= b for a, b in zip(low, high, strict=True))


def _fill(column: ReplicaKind, copies: int) -> list[float]:
    """Part of the cache that a sample/s fills."""
    return [held / column.kv_bytes / copies for held in column.kv_byte_s]


# --- Training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Choice:
    """Pipelines of one type, with what they cost alone."""

    trainer: costs.TrainerCosts
    cost: costs.PartCost
    num_devices: int

    @property
    def alone_s(self) -> float:
        """Time of a step."""
        return self.cost.batch_s + self.cost.fixed_s


def training_plans(
    stock: dict[Device, int], model: ModelShape, workload: WorkloadSpec
) -> tuple[list[TrainingPlan], list[Mixture]]:
    """Pareto-optimal plans (devices of each type, cycle time) over one type, and some over two to begin with; and all
    plans over two types."""
    choices = {device: _choices(device, count, model, workload) for device, count in stock.items()}
    fastest = {device: _fastest(found) for device, found in choices.items()}
    alone = {device: [costs.training_plan((c.trainer,)) for c in found] for device, found in fastest.items()}
    plans = [plan for found in alone.values() for plan in found]
    mixtures = []
    for a, b in combinations([device for device, found in choices.items() if found], 2):
        sides = ([c.trainer for c in _undominated(choices[device])] for device in (a, b))
        mixtures.append(costs.mixture(*sides))
        begun = product(_sizes(fastest[a], stock[a]), _sizes(fastest[b], stock[b]))
        plans += _pareto([costs.training_plan((x.trainer, y.trainer)) for x, y in begun], [*alone[a], *alone[b]])
    return plans, mixtures


def _choices(device: Device, count: int, model: ModelShape, workload: WorkloadSpec) -> list[_Choice]:
    """All shapes that fit into memory and stock."""
    found = []
    for tp, pp in product(_tensor_sizes(device, model), _doublings(min(MAX_STAGES, model.num_layers))):
        for dp, sharded, recompute in product(
            range(1, min(count // (tp * pp), workload.batch_size) + 1), (False, True), (False, True)
        ):
            part = TrainingPart(
                device=device.name, dp=dp, tp=tp, pp=pp, sharded=sharded, recompute=recompute, share=1.0
            )
            trainer = costs.trainer(model, workload, device, part)
            if (dp > 1 or not sharded) and trainer.fits():
                found.append(_Choice(trainer, trainer.cost(), part.num_devices))
    return sorted(found, key=lambda c: (c.num_devices, c.cost.batch_s, c.cost.fixed_s))


def _fastest(choices: list[_Choice]) -> list[_Choice]:
    """For each number of devices the fastest, where more devices are faster."""
    best: list[_Choice] = []
    for _, same in groupby(choices, key=lambda c: c.num_devices):
        choice = min(same, key=lambda c: c.alone_s)
        if not best or choice.alone_s < best[-1].alone_s:
            best.append(choice)
    return best


def _undominated(choices: list[_Choice]) -> list[_Choice]:
    """Without those that another beats at any share of a batch, with no more devices."""
    kept: list[_Choice] = []
    front: list[costs.PartCost] = []  # of those kept: slower per sample, and quicker to begin, one after the other
    for choice in choices:
        cost = choice.cost
        if any(c.batch_s <= cost.batch_s and c.fixed_s <= cost.fixed_s for c in front):
            continue
        kept.append(choice)
        front = [c for c in front if c.batch_s < cost.batch_s or c.fixed_s < cost.fixed_s] + [cost]
    return kept


def _sizes(choices: list[_Choice], count: int) -> list[_Choice]:
    """Those that use most of the stock, of half of it, and so on."""
    chosen = []
    for _ in range(_MIXED_SIZES):
        fitting = [choice for choice in choices if choice.num_devices <= count]
        if not fitting:
            break
        chosen.append(fitting[-1])
        count = fitting[-1].num_devices // 2
    return chosen


def _pareto(plans: list[TrainingPlan], others: list[TrainingPlan]) -> list[TrainingPlan]:
    """Those that really share a batch, without any that another of ``plans`` or ``others`` beats with no more devices
    of any type; ties go to the first."""
    kept: list[TrainingPlan] = []
    for plan in sorted(plans, key=lambda p: (p.cycle_s, p.num_devices)):
        quicker = [other for other in others if other.cycle_s <= plan.cycle_s]
        if all(part.share > 0 for part in plan.parts) and not any(_within(o, plan) for o in (*kept, *quicker)):
            kept.append(plan)
    return kept


def _within(other: TrainingPlan, plan: TrainingPlan) -> bool:
    return all(plan.count(part.device) >= part.num_devices for part in other.parts)


# --- Shapes -----------------------------------------------------------------------------------------------------------


def _tensor_sizes(device: Device, model: ModelShape) -> list[int]:
    """Powers of two that divide the heads and, so that replicas pack without gaps, the node."""
    return [n for n in _doublings(device.node_size) if device.node_size % n == 0 and model.num_heads % n == 0]


def _doublings(largest: int) -> list[int]:
    return [1 << i for i in range(largest.bit_length())]


def _no_room(stock: dict[Device, int], model: ModelShape, workload: WorkloadSpec, act: str) -> str:
    """What would be needed where the model fits nowhere."""
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
    lines.append("add devices of a type, or take ones with more memory, a smaller model or shorter responses")
    return "\n".join(lines)


def _least_rollout_bytes(device: Device, count: int, model: ModelShape, workload: WorkloadSpec) -> tuple[float, str]:
    """Of a device in the widest replica: weights and the longest sample's cache."""
    widest = [
        (tp * pp, tp, pp)
        for tp, pp in product(_tensor_sizes(device, model), _doublings(min(MAX_REPLICA_STAGES, model.num_layers)))
        if tp * pp <= count
    ]
    size, tp, pp = max(widest)
    engine = costs.replica(model, workload, device, tp, pp)
    room = engine.kv_bytes_per_token * costs.longest_tokens(workload)
    return (workload.rollout_weight_bytes * model.parameters + room) / size, f"tp {tp} x pp {pp}"


def _least_training_bytes(device: Device, count: int, model: ModelShape, workload: WorkloadSpec) -> tuple[float, str]:
    """Of a device in the most divided plan."""
    trainers = []
    for tp, pp in product(_tensor_sizes(device, model), _doublings(min(MAX_STAGES, model.num_layers))):
        dp = min(count // (tp * pp), workload.batch_size)
        if dp:
            part = TrainingPart(device=device.name, dp=dp, tp=tp, pp=pp, sharded=True, recompute=True, share=1.0)
            trainers.append(costs.trainer(model, workload, device, part))
    least = min(trainers, key=lambda trainer: trainer.memory_bytes)
    return least.memory_bytes, f"dp {least.dp} x tp {least.tp} x pp {least.pp}, sharded and recomputing"
