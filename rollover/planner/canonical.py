"""A problem in canonical order, so that equal problems give equal plans whatever the order and names of types."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollover.devices.costs.records import Mixture, PartCost
from rollover.planner.records import Problem, Supply


def canonical(problem: Problem) -> tuple[Problem, tuple[int, ...]]:
    """Sort a problem by what things are, never by what they are called; return with it the new place of each kind of
    replica."""

    def signature(index: int) -> tuple[Any, ...]:
        c = problem.replica_kinds[index]
        return (c.num_devices, c.batch_cap, c.tp, c.rates, c.group_latencies_s, c.updates_s, c.kv_bytes, c.kv_byte_s)

    members: dict[str, list[int]] = {supply.device: [] for supply in problem.supplies}
    for index in sorted(range(len(problem.replica_kinds)), key=signature):
        members[problem.replica_kinds[index].device].append(index)

    def signature_of_supply(supply: Supply) -> tuple[Any, ...]:
        limits = tuple(
            -1.0 if v is None else v for v in (supply.price_per_hour, supply.max_rollout, supply.max_training)
        )
        plans = sorted((p.cycle_s, p.count(supply.device)) for p in problem.plans if p.count(supply.device))
        return (supply.count, *limits, [signature(i) for i in members[supply.device]], plans)

    supplies = sorted(problem.supplies, key=signature_of_supply)
    kinds = [index for supply in supplies for index in members[supply.device]]
    plans = sorted(problem.plans, key=lambda p: (p.cycle_s, p.step_s, [p.count(s.device) for s in supplies]))
    ordered = replace(
        problem,
        supplies=tuple(supplies),
        replica_kinds=tuple(problem.replica_kinds[i] for i in kinds),
        plans=tuple(plans),
        mixtures=_ordered(problem.mixtures, {supply.device: place for place, supply in enumerate(supplies)}),
    )
    places = {index: place for place, index in enumerate(kinds)}
    return ordered, tuple(places[i] for i in range(len(kinds)))


def _ordered(mixtures: tuple[Mixture, ...], places: dict[str, int]) -> tuple[Mixture, ...]:
    def place(side: tuple[PartCost, ...]) -> int:
        return places[side[0].part.device]

    turned = [replace(m, first=m.second, second=m.first) if place(m.first) > place(m.second) else m for m in mixtures]
    return tuple(sorted(turned, key=lambda m: (place(m.first), place(m.second))))
