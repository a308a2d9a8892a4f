"""Room on the cluster for ranks: a placement group, waited for within a deadline, and what is missing."""

from __future__ import annotations

from typing import Any

from rollover.cluster.nodes import NodeDemand, alive_nodes, described, room_for, written
from rollover.errors import ConfigError


class NotPlaced(ConfigError):
    """Bundles for which the cluster has had no room in time; the message names what is missing.

    Example: ``the trainer needs 2 bundles of CPU 1, h100 1 (...), for which the Ray cluster had no room within 60 s``
    """


def place(ray: Any, demand: NodeDemand, *, timeout_s: float, strategy: str = "PACK") -> Any:
    """Return a placement group with the bundles of ``demand``, once all of them are reserved.

    Raises ``NotPlaced`` when they are not within ``timeout_s``; nothing is reserved then.
    """
    from ray.util.placement_group import placement_group

    group = placement_group([dict(demand.bundle)] * demand.count, strategy=strategy)
    try:
        if group.wait(timeout_s):
            return group
        raise NotPlaced(_missing(ray, demand, timeout_s))
    except BaseException:
        remove(group)
        raise


def remove(group: Any) -> None:
    """Give back what a placement group has reserved; the actors in it end."""
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


def _missing(ray: Any, demand: NodeDemand, timeout_s: float) -> str:
    nodes = alive_nodes(ray)
    free = ray.available_resources()
    lacking = room_for(demand, nodes) < demand.count
    names = {name: float(free.get(name, 0.0)) for name in demand.bundle}
    remedy = "add nodes" if lacking else "end other jobs there"
    return (
        f"{demand} ({demand.keys}), for which the Ray cluster had no room within {timeout_s:g} s"
        f" (cluster.placement_timeout_s): {described(nodes)}; free on all nodes together: {written(names)}; {remedy},"
        " or lower these settings"
    )
