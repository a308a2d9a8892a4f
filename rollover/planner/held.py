"""The rate that given replicas and a given trainer reach: phase 1 with nothing left to choose but who decodes what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollover.planner.milp import solve
from rollover.planner.records import Binding, Problem, Solution, Supply


def held(problem: Problem, replicas: Sequence[int]) -> Solution | None:
    """The best solution of ``problem`` with just these ``replicas`` of its columns and its one training plan; ``None``
    where they break a limit.

    Every column is made a device type of its own, with the stock of its replicas: more of one kind cannot stand in for
    another.
    """
    (plan,) = problem.plans
    prices = {supply.device: supply.price_per_hour for supply in problem.supplies}
    names = [f"{column.device}#{c}" for c, column in enumerate(problem.columns)]
    supplies = [
        Supply(device=name, count=y * column.num_devices, price_per_hour=prices[column.device], max_training=0)
        for name, column, y in zip(names, problem.columns, replicas, strict=True)
    ]
    parts = tuple(replace(part, device=f"{part.device}#train") for part in plan.parts)
    supplies += [
        Supply(device=f"{p.device}#train", count=p.num_devices, price_per_hour=prices[p.device], max_rollout=0)
        for p in plan.parts
    ]
    columns = tuple(replace(column, device=name) for column, name in zip(problem.columns, names, strict=True))
    alone = replace(
        problem,
        supplies=tuple(supplies),
        columns=columns,
        plans=(replace(plan, parts=parts),),
        target_steps_per_s=None,
    )
    found = solve(alone, simplify=False)
    if found is None:
        return None
    cost = _cost(problem, replicas)
    bindings = tuple(_renamed(b) for b in found.bindings if b.row != "stock") + _stock(problem, replicas)
    return replace(found, plan=plan, replicas=tuple(replicas), cost_per_hour=cost, bindings=bindings)


def _used(problem: Problem, replicas: Sequence[int]) -> dict[str, int]:
    used = {supply.device: problem.plans[0].count(supply.device) for supply in problem.supplies}
    for column, y in zip(problem.columns, replicas, strict=True):
        used[column.device] += y * column.num_devices
    return used


def _cost(problem: Problem, replicas: Sequence[int]) -> float | None:
    """Of the devices in use; ``None`` where one of their prices is unknown."""
    used = _used(problem, replicas)
    total = 0.0
    for supply in problem.supplies:
        if used[supply.device] and supply.price_per_hour is None:
            return None
        total += used[supply.device] * (supply.price_per_hour or 0.0)
    return total


def _stock(problem: Problem, replicas: Sequence[int]) -> tuple[Binding, ...]:
    used = _used(problem, replicas)
    return tuple(
        Binding(row="stock", subject=supply.device, slack=0.0)
        for supply in problem.supplies
        if used[supply.device] >= supply.count
    )


def _renamed(binding: Binding) -> Binding:
    name, sign, rest = binding.subject.partition("#")
    return replace(binding, subject=f"{name} {rest.partition(' ')[2]}") if sign else binding
