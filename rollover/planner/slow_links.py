"""Links between trainer and replicas that are too slow for weights on each step: use a swarm there.

Engines that receive weights pause during the transfer; the workers of a swarm fetch them while they decode. One
condition on both sides of the loop remains (ECHO-2, arXiv 2602.02192): while the trainer makes ``kappa`` steps, the
workers must decode the samples of ``kappa`` steps in the time that one broadcast leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rollover.devices.costs.links import narrowest, transfer_s
from rollover.devices.records import Link
from rollover.planner.plan import Plan
from rollover.planner.topology import Topology

SLOW_PART = 0.1
"""Fraction of a training step above which the transfer of the weights makes a link slow."""
DELTA_PART = 0.03
"""Bytes of a delta as a fraction of the full weights at the learning rates of RL; published figures: 0.01 to 0.03."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightWay:
    """The way of new weights from trainer to replicas.

    Example: 16 GB over 125 MB/s are ``full_s=128.0`` and, as a delta of 3%, ``delta_s=3.84``.
    """

    num_bytes: float
    link: Link
    """The narrowest link on the way."""
    full_s: float
    delta_s: float

    @classmethod
    def over(cls, link: Link, num_bytes: float, efficiency: float) -> WeightWay:
        """Return the times over a link, of whose bandwidth ``efficiency`` is reached."""
        full_s, delta_s = (transfer_s(size, link, efficiency) for size in (num_bytes, DELTA_PART * num_bytes))
        return cls(num_bytes=num_bytes, link=link, full_s=full_s, delta_s=delta_s)

    def is_slow(self, step_s: float) -> bool:
        """Tell whether the full weights take a part of a training step that counts."""
        return self.full_s > SLOW_PART * step_s


def overlaps(samples_per_s: float, kappa: int, step_s: float, broadcast_s: float, batch_size: int) -> bool:
    """Tell whether the trainer never waits when it publishes every ``kappa`` steps.

    Example: workers that decode 12 samples/s fill batches of 1,000 for steps of 100 s: 12 * (2 * 100 - 30) = 2,040 is
    at least 2 * 1,000, but 12 * (1 * 100 - 30) = 840 is less than 1,000: every second step it is.
    """
    return samples_per_s * (kappa * step_s - broadcast_s) >= kappa * batch_size


def least_kappa(samples_per_s: float, step_s: float, broadcast_s: float, batch_size: int) -> int | None:
    """Return the least number of steps between two publications with which the trainer never waits; ``None`` where
    workers cannot decode a batch within a step, however rarely weights come.

    Example: ``least_kappa(12.0, 100.0, 30.0, 1000)`` is 2: each step leaves 100 - 1,000 / 12 = 16.7 s.
    """
    spare_s = step_s - batch_size / samples_per_s
    if spare_s <= 0:
        return None
    kappa = max(1, math.floor(broadcast_s / spare_s))
    return kappa if overlaps(samples_per_s, kappa, step_s, broadcast_s, batch_size) else kappa + 1


def samples_per_s(plan: Plan) -> float:
    """Return how many samples the plan's replicas decode in a second when none of them waits for weights."""
    rates = plan.solution.rates
    total = 0.0
    for c, kind in enumerate(plan.problem.replica_kinds):
        if busy := sum(x / r for x, r in zip(rates[c], kind.rates, strict=True) if x):
            total += sum(rates[c]) * plan.solution.replicas[c] / busy
    return total


def way_of_weights(plan: Plan) -> WeightWay | None:
    """Return the way of weights to the replicas of a plan; ``None`` where they stay on the nodes that train."""
    topology = Topology.of(plan.fleet)
    ways = topology.broadcast(plan.placement.training_nodes, plan.placement.rollout_nodes)
    return _way(plan, narrowest(ways.values()))


def way_to_idle(plan: Plan) -> tuple[tuple[str, ...], WeightWay] | None:
    """Return the nodes that a plan leaves idle, and the way of weights to the nearest of them; ``None`` without any."""
    topology, nodes = Topology.of(plan.fleet), plan.fleet.nodes
    used = {*plan.placement.training_nodes, *plan.placement.rollout_nodes}
    idle = [i for i in range(len(nodes)) if i not in used]
    links = [link for link in topology.broadcast(plan.placement.training_nodes, idle).values() if link is not None]
    way = _way(plan, max(links, key=lambda link: link.bytes_per_s, default=None))
    return None if way is None else (tuple(nodes[i].name for i in idle), way)


def _way(plan: Plan, link: Link | None) -> WeightWay | None:
    if link is None:
        return None
    num_bytes = plan.workload.rollout_weight_bytes * plan.model.parameters
    efficiency = min(device.efficiency.link for device in plan.fleet.devices)
    return WeightWay.over(link, num_bytes, efficiency)


def slow_links(plan: Plan) -> Iterator[str]:
    """Say where links are so slow that a swarm is the right answer, and what it takes there."""
    step_s = plan.solution.plan.step_s
    way = way_of_weights(plan)
    if way is not None and way.is_slow(step_s):
        yield (
            f"Slow link: {_transfer(way, step_s)}, during which the engines of a pool pause. Use a swarm"
            f' here (engine.kind = "swarm"): its workers keep decoding while they fetch, and a delta of'
            f" {DELTA_PART:.0%} takes {_seconds(way.delta_s)}. {_kappa(plan, way, step_s)}"
        )
    found = way_to_idle(plan)
    if found is not None and found[1].is_slow(step_s):
        names, way = found
        yield (
            f"Idle because of a slow link: {', '.join(names)}. {_transfer(way, step_s)}; as workers of a swarm"
            f' (engine.kind = "swarm") they would keep decoding while they fetch, and a delta of {DELTA_PART:.0%} would'
            f" take {_seconds(way.delta_s)}."
        )


def _transfer(way: WeightWay, step_s: float) -> str:
    return (
        f"{way.num_bytes / 1e9:,.3g} GB of weights take {_seconds(way.full_s)} over"
        f" {way.link.bytes_per_s * 8 / 1e9:,.3g} Gbit/s, {way.full_s / step_s:.2g} of a training step"
    )


def _kappa(plan: Plan, way: WeightWay, step_s: float) -> str:
    rate, batch = samples_per_s(plan), plan.workload.batch_size
    full, delta = (least_kappa(rate, step_s, taken_s, batch) for taken_s in (way.full_s, way.delta_s))
    if full is None or delta is None:
        return "The trainer would wait for samples there too, because these replicas decode fewer than it trains."
    if full == delta:
        return f"The trainer never waits when weights are published {_every(full)} (max_staleness {full + 1} or more)."
    return (
        f"The trainer never waits when full weights are published {_every(full)}, or deltas {_every(delta)}"
        f" (max_staleness {delta + 1} or more)."
    )


def _every(kappa: int) -> str:
    return "on each step" if kappa == 1 else f"every {kappa:,} steps"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.3g} s" if seconds < 600 else f"{seconds / 60:,.3g} min"
