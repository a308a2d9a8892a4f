"""A finished plan: the role of every device, throughput, cost, and the alternatives it was compared with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from rollover.devices.records import ModelShape, WorkloadSpec
from rollover.planner.placement import Placement
from rollover.planner.records import Fleet, Problem, Solution
from rollover.trainer.parallelism import unsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another plan to compare with."""

    name: str
    steps_per_s: float
    cost_per_hour: float | None
    devices: dict[str, int]
    """Number of devices in use, by type."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Roles, shapes and places of all devices in use, and the resulting throughput and cost."""

    fleet: Fleet
    model: ModelShape
    workload: WorkloadSpec
    problem: Problem
    """The problem whose kinds are the replicas in use and whose one training plan is the chosen one, both at their real
    links."""
    solution: Solution
    placement: Placement
    """``member`` of a replica is an index of the problem's kinds of replica."""
    rounds: tuple[tuple[float, float], ...] = ()
    """For each pass through both phases, the rate that phase 1 assumed and the rate on the links of the placement; 0 if
    it breaks a limit."""
    alternatives: tuple[Alternative, ...] = ()
    """Other ways to spend the same money or the same devices."""
    simulated_steps_per_s: float | None = None
    """Rate that a simulation of the whole loop reached; ``None`` if it was not run."""
    notes: tuple[str, ...] = ()
    """Sentences on what it does not know of its workload."""

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Say which parts of this plan ``rollover launch`` cannot run; empty if it can run all of it."""
        parts = self.solution.plan.parts
        found: list[str] = []
        if len(parts) > 1:
            names = " and ".join(part.device for part in parts)
            found.append(f"it trains on {len(parts)} types of device ({names}), but the trainer supports only one")
        for part in parts:
            reason = unsupported(dp=part.dp, tp=part.tp, pp=part.pp, sharded=part.sharded)
            if reason is not None:
                found.append(f"on {part.device}, {reason}")
        if several := sum(len({*replica.nodes}) > 1 for replica in self.placement.replicas):
            found.append(f"{several} of its replicas span several nodes, but a server runs on one")
        return tuple(found)

    @property
    def trusted_steps_per_s(self) -> float:
        """Return the simulated rate if there is one, else the formula's."""
        return self.simulated_steps_per_s or self.solution.steps_per_s

    @property
    def tokens_per_s(self) -> float:
        """Return the number of response tokens that are trained per second."""
        return self.trusted_steps_per_s * step_tokens(self.workload)

    @property
    def cost_per_million_tokens(self) -> float | None:
        """Return the cost of a million trained tokens in the fleet's currency; ``None`` where a price is missing."""
        cost = self.cost_per_hour
        return None if cost is None else cost / 3600 / self.tokens_per_s * 1e6

    @property
    def cost_per_hour(self) -> float | None:
        """Return the cost per hour of the devices in use; ``None`` if a price is missing."""
        used = [(device.price_per_hour, self.used.get(device.name, 0)) for device in self.fleet.devices]
        costs = [price if price is None else price * count for price, count in used if count]
        return None if None in costs else sum(cost or 0.0 for cost in costs)

    @cached_property
    def used(self) -> dict[str, int]:
        """Return the number of devices of each type that are in use."""
        found = Counter({part.device: part.num_devices for part in self.solution.plan.parts})
        for c in self.solution.active:
            kind = self.problem.replica_kinds[c]
            found[kind.device] += self.solution.replicas[c] * kind.num_devices
        return dict(found)

    @property
    def idle(self) -> dict[str, int]:
        """Return the number of devices of each type that are not in use, for each type that has any."""
        left = {device.name: count - self.used.get(device.name, 0) for device, count in self.fleet.stock.items()}
        return {name: count for name, count in left.items() if count}

    def to_json(self) -> str:
        """Return the whole plan as JSON, which pydantic reads back."""
        from pydantic import TypeAdapter

        return TypeAdapter(Plan).dump_json(self, indent=2).decode()


def step_tokens(workload: WorkloadSpec) -> float:
    """Return the number of response tokens of a training step."""
    return workload.batch_size * workload.response_tokens
