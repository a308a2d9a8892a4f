"""Training plans to choose from: those that fit into memory, without those that another is at least as good as.

Leaving out a dominated choice never changes the optimum: wherever it stands, the better one could.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, groupby, product

from rollover.devices.costs.records import Mixture, TrainingPart, TrainingPlan
from rollover.devices.costs.training import PartCost, TrainerCosts, trainer_costs, training_mixture, training_plan
from rollover.devices.records import Device, ModelShape, WorkloadSpec
from rollover.planner.shapes import MAX_TRAINING_STAGES, shapes

_MIXED_SIZES = 6
"""Sizes, by halving the stock, from which the first training plans over two types are put together."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """Pipelines of one type, with what they cost alone."""

    trainer: TrainerCosts
    cost: PartCost
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
    alone = {device: [training_plan((c.trainer,)) for c in found] for device, found in fastest.items()}
    plans = [plan for found in alone.values() for plan in found]
    mixtures = []
    for a, b in combinations([device for device, found in choices.items() if found], 2):
        sides = ([c.trainer for c in _undominated(choices[device])] for device in (a, b))
        mixtures.append(training_mixture(*sides))
        begun = product(_sizes(fastest[a], stock[a]), _sizes(fastest[b], stock[b]))
        plans += _pareto([training_plan((x.trainer, y.trainer)) for x, y in begun], [*alone[a], *alone[b]])
    return plans, mixtures


def _choices(device: Device, count: int, model: ModelShape, workload: WorkloadSpec) -> list[_Choice]:
    """All shapes that fit into memory and stock."""
    found = []
    for tp, pp in shapes(device, model, MAX_TRAINING_STAGES):
        for dp, sharded, recompute in product(
            range(1, min(count // (tp * pp), workload.batch_size) + 1), (False, True), (False, True)
        ):
            part = TrainingPart(
                device=device.name, dp=dp, tp=tp, pp=pp, sharded=sharded, recompute=recompute, share=1.0
            )
            trainer = trainer_costs(model, workload, device, part)
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
    front: list[PartCost] = []  # of those kept: slower per sample, and quicker to begin, one after the other
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
