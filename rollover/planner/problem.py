"""The planning problem of a fleet: the optimiser's choices and limits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollover.devices.records import Device, ModelShape, WorkloadSpec
from rollover.errors import PlanError
from rollover.planner.choices import no_room, replica_kinds, training_plans
from rollover.planner.launchable import can_serve
from rollover.planner.records import Fleet, Problem, Supply, Tail
from rollover.planner.routing import Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSpec:
    """The request for a plan, independent of the fleet.

    Example: ``PlanSpec(model=qwen_7b, workload=math_16k, max_staleness=4)`` asks for the fastest plan whose trained
    tokens are at most 4 versions old; with ``target_steps_per_s=0.02`` for the cheapest that trains a step every 50 s.
    """

    model: ModelShape
    workload: WorkloadSpec
    max_staleness: int
    target_steps_per_s: float | None = None
    """The rate that the cheapest plan must reach; ``None`` asks for the fastest plan."""
    tail: Tail = "soft"
    """``soft`` or ``hard``: even the longest response keeps the staleness bound, so that no step waits for one;
    ``none``: the bound is kept on average only. The scheduler keeps it for every group, by waiting."""
    routing: Routing = "load"
    launchable: bool = False
    """If true, ``rollover launch`` must be able to run the plan."""
    metis: bool = False
    """If true, placement also starts from a METIS bisection."""


def fleet_problem(fleet: Fleet, spec: PlanSpec) -> Problem:
    """Build the planning problem of a fleet, with all length buckets.

    Raises:
        PlanError: the model fits nowhere.
    """
    built = stock_problem(
        fleet.stock, spec.model, spec.workload, max_staleness=spec.max_staleness, launchable=spec.launchable
    )
    return replace(
        built, budget_per_hour=fleet.budget_per_hour, target_steps_per_s=spec.target_steps_per_s, tail=spec.tail
    )


def stock_problem(
    stock: dict[Device, int], model: ModelShape, workload: WorkloadSpec, *, max_staleness: int, launchable: bool = False
) -> Problem:
    """Build the problem of ``stock``, the number of devices of each type, without a budget.

    Raises:
        PlanError: the model fits nowhere.
    """
    if max_staleness < 0:
        raise PlanError(f"max_staleness must be at least 0, got {max_staleness}")
    kinds = [
        c
        for device, n in stock.items()
        for c in replica_kinds(device, n, model, workload)
        if not launchable or can_serve(c, device)
    ]
    if not kinds:
        raise PlanError(no_room(stock, model, workload, "roll out"))
    plans, mixtures = training_plans(stock, model, workload, launchable=launchable)
    if not plans:
        raise PlanError(no_room(stock, model, workload, "train"))
    return Problem(
        supplies=supplies(stock),
        replica_kinds=tuple(kinds),
        plans=tuple(plans),
        mixtures=tuple(mixtures),
        workload=workload,
        max_staleness=max_staleness,
    )


def supplies(stock: dict[Device, int]) -> tuple[Supply, ...]:
    """Return the supply of each type: ``stock`` gives the number of its devices, all for either role."""
    return tuple(Supply(device=d.name, count=n, price_per_hour=d.price_per_hour) for d, n in stock.items())
