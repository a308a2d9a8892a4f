"""Tells when links between trainer and replicas are too slow for weights on each step, and a swarm should be used.

Engines that receive weights pause during the transfer; the workers of a swarm fetch them while they decode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollover.devices.costs.links import narrowest, transfer_s
from rollover.devices.records import Link
from rollover.planner.placement import weight_ways
from rollover.planner.plan import Plan
from rollover.planner.topology import Topology

SLOW_PART = 0.1
"""Fraction of the trainer's time for a step above which the transfer of the weights makes a link slow."""
DELTA_PART = 0.03
"""Bytes of a delta as a fraction of the full weights at the learning rates of RL; published figures: 0.01 to 0.03."""


def slow_links(plan: Plan) -> Iterator[str]:
    """Describe links to replicas and to idle nodes that are so slow that a swarm should be used."""
    nodes = plan.fleet.nodes
    training, rolling = plan.placement.training_nodes, plan.placement.rollout_nodes
    slowest = narrowest(_links(plan, rolling))
    if slowest is not None and (said := _slow(plan, slowest)):
        yield (
            f"Slow link: {said}, during which the engines of a pool pause. Use a swarm here (engine.kind = "
            f'"swarm"): its workers keep decoding while they fetch, and a delta of {DELTA_PART:.0%} takes'
            f" {_seconds(_transfers(plan, slowest)[1])}."
        )
    idle = [i for i in range(len(nodes)) if i not in {*training, *rolling}]
    widest = max(_links(plan, idle), key=lambda link: link.bytes_per_s, default=None)
    if widest is not None and (said := _slow(plan, widest)):
        yield (
            f"Idle because of a slow link: {', '.join(nodes[i].name for i in idle)}. {said}; as workers of a swarm"
            f' (engine.kind = "swarm") they would keep decoding while they fetch, and a delta of {DELTA_PART:.0%} would'
            f" take {_seconds(_transfers(plan, widest)[1])}."
        )


def _links(plan: Plan, nodes: Sequence[int]) -> list[Link]:
    """Return the narrowest link on the way of the weights to each of the nodes that do not train a whole copy."""
    ways = weight_ways(Topology.of(plan.fleet), plan.solution.plan, plan.placement, nodes)
    return [link for link in ways.values() if link is not None]


def _transfers(plan: Plan, link: Link) -> tuple[float, float]:
    """Return the seconds that full weights take over a link, and those of a delta."""
    num_bytes = plan.workload.rollout_weight_bytes * plan.model.parameters
    efficiency = min(device.efficiency.link for device in plan.fleet.devices)
    return transfer_s(num_bytes, link, efficiency), transfer_s(DELTA_PART * num_bytes, link, efficiency)


def _slow(plan: Plan, link: Link) -> str:
    """Describe the transfer over a slow link; empty if the link is fast enough."""
    full_s, step_s = _transfers(plan, link)[0], plan.solution.plan.step_s
    if full_s <= SLOW_PART * step_s:
        return ""
    return (
        f"{plan.workload.rollout_weight_bytes * plan.model.parameters / 1e9:,.3g} GB of weights take {_seconds(full_s)}"
        f" over {link.bytes_per_s * 8 / 1e9:,.3g} Gbit/s (the trainer computes for {_seconds(step_s)} per step)"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:,.3g} s" if seconds < 600 else f"{seconds / 60:,.3g} min"
