"""The planning problem of a fleet: the optimiser's choices and limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from rollover.devices.records import Device, Link, ModelShape, WorkloadSpec
from rollover.errors import PlanError
from rollover.planner.choices import no_room, training_plans, undominated_kinds
from rollover.planner.records import Fleet, Problem, Server, Supply, Tail
from rollover.planner.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSpec:
    """The request for a plan, independent of the fleet."""

    model: ModelShape
    workload: WorkloadSpec
    max_staleness: int
    target_steps_per_s: float | None = None
    """The rate that the cheapest plan must reach; ``None`` asks for the fastest plan."""
    tail: Tail = "soft"
    """``soft`` or ``hard``: even the longest response keeps the staleness bound, so that no step waits for one;
    ``none``: the bound is kept on average only. The scheduler keeps it for every group, by waiting."""
    launchable: Server | None = None
    """The kind of servers with which ``rollover launch`` must be able to run the plan; ``None`` for any plan."""


def fleet_problem(
    fleet: Fleet, spec: PlanSpec, networks: Mapping[str, Link] | None = None, *, inside: Collection[str] = ()
) -> Problem:
    """Build the planning problem of a fleet. Raises ``PlanError`` if the model fits nowhere.

    Args:
        networks: links between nodes by device type, if they differ from the fleet's.
        inside: types that train a whole copy in each of their nodes, so that new weights do not leave it.
    """
    built = stock_problem(
        with_networks(fleet.stock, networks or {}),
        spec.model,
        spec.workload,
        max_staleness=spec.max_staleness,
        node_sizes=fleet.node_sizes,
        across=Topology.of(fleet).across(),
        inside=Counter(node.device.name for node in fleet.nodes if node.device.name in inside),
        launchable=spec.launchable,
    )
    return replace(
        built, budget_per_hour=fleet.budget_per_hour, target_steps_per_s=spec.target_steps_per_s, tail=spec.tail
    )


def with_networks(stock: dict[Device, int], networks: Mapping[str, Link]) -> dict[Device, int]:
    """Return the stock with other links between nodes, given by device type."""
    return {replace(device, network=networks.get(device.name, device.network)): n for device, n in stock.items()}


def stock_problem(
    stock: dict[Device, int],
    model: ModelShape,
    workload: WorkloadSpec,
    *,
    max_staleness: int,
    node_sizes: Mapping[str, tuple[int, ...]] | None = None,
    across: Mapping[tuple[str, str], Link] | None = None,
    inside: Mapping[str, int] | None = None,
    launchable: Server | None = None,
) -> Problem:
    """Build the problem of ``stock``, the number of devices of each type, without a budget. Raises ``PlanError`` if the
    model fits nowhere.

    Args:
        node_sizes: number of devices of each node of a type, if not all nodes but one have the type's.
        across: links between types, if they are not the narrower of their networks.
        inside: number of nodes of each type that trains a whole copy in each node, so that new weights do not leave it.
    """
    if max_staleness < 0:
        raise PlanError(f"max_staleness must be at least 0, got {max_staleness}")
    if launchable == "embedded_server" and model.not_embedded:
        raise PlanError(
            f"the embedded engine cannot run {model.name}: {model.not_embedded}. Plan for others: --server vllm or"
            " sglang"
        )
    inside, node_sizes = inside or {}, node_sizes or {d.name: _split(n, d.node_size) for d, n in stock.items()}
    kinds = [
        c
        for device in with_networks(stock, {d.name: d.link for d in stock if d.name in inside})
        for c in undominated_kinds(device, node_sizes[device.name], model, workload)
        if not (launchable or device.name in inside)
        or c.num_devices <= (1 if launchable == "embedded_server" else device.node_size)
    ]
    if not kinds:
        raise PlanError(no_room(stock, node_sizes, model, workload, "roll out", launchable))
    plans = training_plans(
        stock, model, workload, node_sizes=node_sizes, across=across or {}, inside=inside, launchable=bool(launchable)
    )
    if not plans:
        raise PlanError(no_room(stock, node_sizes, model, workload, "train", launchable))
    return Problem(
        supplies=supplies(stock, node_sizes),
        replica_kinds=tuple(kinds),
        plans=tuple(plans),
        workload=workload,
        max_staleness=max_staleness,
        inside=tuple(inside),
    )


def _split(count: int, node_size: int) -> tuple[int, ...]:
    """Return the sizes of the nodes of ``count`` devices: all but the last have ``node_size``."""
    rest = count % node_size
    return (node_size,) * (count // node_size) + (rest,) * (rest > 0)


def supplies(stock: dict[Device, int], node_sizes: Mapping[str, tuple[int, ...]]) -> tuple[Supply, ...]:
    """Return the supply of each type: ``stock`` gives the number of its devices, all for either role."""
    return tuple(
        Supply(device=d.name, count=n, price_per_hour=d.price_per_hour, node_sizes=node_sizes[d.name])
        for d, n in stock.items()
    )
