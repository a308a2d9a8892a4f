"""What a plan is compared with: fleets of one type for the same money, and splits made by rule of thumb."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rollover.devices.records import Device, ModelShape, WorkloadSpec
from rollover.errors import PlanError
from rollover.planner import columns
from rollover.planner.milp import GAP, TIME_LIMIT_S, solve
from rollover.planner.records import Fleet, Problem, Solution, Supply

ROLLOUT_PART = 0.75
"""Of the devices, in the hand-picked split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """An alternative and what it reaches."""

    name: str
    problem: Problem | None
    """``None`` where the model does not fit."""
    solution: Solution | None
    """``None`` where nothing keeps its limits."""


def one_type(
    device: Device,
    model: ModelShape,
    workload: WorkloadSpec,
    *,
    budget_per_hour: float,
    max_staleness: int,
    target_steps_per_s: float | None = None,
    gap: float = GAP,
    time_limit_s: float = TIME_LIMIT_S,
) -> Baseline:
    """The best plan with as many devices of one type as the budget buys; with a target, the cheapest to reach it."""
    name = f"only {device.name}"
    if device.price_per_hour is None:
        raise PlanError(f"{name}: what a budget buys cannot be known without the price of {device.name}")
    count = int(budget_per_hour / device.price_per_hour * (1 + 1e-9))
    if count == 0:
        return Baseline(name=name, problem=None, solution=None)
    try:
        built = columns.of_stock({device: count}, model, workload, max_staleness=max_staleness)
    except PlanError:
        return Baseline(name=name, problem=None, solution=None)
    problem = replace(built, target_steps_per_s=target_steps_per_s)
    return Baseline(name=name, problem=problem, solution=solve(problem, gap=gap, time_limit_s=time_limit_s))


def best_homogeneous(
    fleet: Fleet,
    model: ModelShape,
    workload: WorkloadSpec,
    *,
    budget_per_hour: float,
    max_staleness: int,
    gap: float = GAP,
    time_limit_s: float = TIME_LIMIT_S,
) -> tuple[Baseline, ...]:
    """One baseline for each type of the fleet, the fastest first."""
    found = [
        one_type(
            device,
            model,
            workload,
            budget_per_hour=budget_per_hour,
            max_staleness=max_staleness,
            gap=gap,
            time_limit_s=time_limit_s,
        )
        for device in fleet.devices
    ]
    return tuple(sorted(found, key=lambda b: -b.solution.steps_per_s if b.solution else 0.0))


def by_rule(problem: Problem, fleet: Fleet, *, gap: float = GAP, time_limit_s: float = TIME_LIMIT_S) -> Baseline:
    """Three quarters of the devices roll out, as in AReaL (arXiv 2505.24298): those with most FLOP/s train."""
    devices = {device.name: device for device in fleet.devices}
    total = sum(supply.count for supply in problem.supplies)
    training = _taken(problem, lambda s: -devices[s.device].flops, total - int(ROLLOUT_PART * total))
    return _split(problem, "75:25", training, gap, time_limit_s)


def greedy(problem: Problem, fleet: Fleet, *, gap: float = GAP, time_limit_s: float = TIME_LIMIT_S) -> Baseline:
    """The type with most FLOP/s per memory bandwidth trains, the others roll out: no type does both. Of one type alone
    a half each."""
    devices = {device.name: device for device in fleet.devices}

    def intensity(supply: Supply) -> float:
        return devices[supply.device].flops / devices[supply.device].hbm_bytes_per_s

    first = max(problem.supplies, key=intensity)
    alone = len(problem.supplies) == 1
    training = {s.device: s.count if s is first else 0 for s in problem.supplies}
    if alone:
        training[first.device] = max(1, first.count // 2)
    return _split(problem, "greedy", training, gap, time_limit_s)


def at_random(problem: Problem, *, seed: int = 0, gap: float = GAP, time_limit_s: float = TIME_LIMIT_S) -> Baseline:
    """Roles drawn device by device."""
    draw = random.Random(seed)
    training = {s.device: draw.randint(0, s.count) for s in problem.supplies}
    return _split(problem, "random", training, gap, time_limit_s)


def _taken(problem: Problem, order: Callable[[Supply], float], count: int) -> dict[str, int]:
    """``count`` devices, type by type in ``order``."""
    training = {}
    for supply in sorted(problem.supplies, key=order):
        training[supply.device] = min(supply.count, count)
        count -= training[supply.device]
    return training


def _split(problem: Problem, name: str, training: Mapping[str, int], gap: float, time_limit_s: float) -> Baseline:
    """The best plan when at most so many devices of each type train and the others roll out."""
    supplies = tuple(
        replace(s, max_training=training[s.device], max_rollout=s.count - training[s.device]) for s in problem.supplies
    )
    held = replace(problem, supplies=supplies, target_steps_per_s=None)
    return Baseline(name=name, problem=held, solution=solve(held, gap=gap, time_limit_s=time_limit_s, simplify=False))
