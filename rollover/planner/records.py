"""Records that the parts of the planner exchange: frozen, in SI units as in ``rollover.devices.records``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollover.devices.costs.records import ReplicaKind, TrainingPlan
from rollover.devices.records import Device, Link, WorkloadSpec

Tail = Literal["none", "soft", "hard"]
Server = Literal["vllm", "sglang", "embedded_server"]
"""Kinds of servers that a plan is carried out with."""

MAX_DEVICES = 65_536
"""Maximum number of devices of a fleet; a larger number is taken for a typing error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the fleet."""

    name: str
    device: Device
    num_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The nodes to plan with, their links and the budget; at most ``MAX_DEVICES`` devices."""

    name: str
    nodes: tuple[Node, ...]
    links: tuple[tuple[str, str, Link], ...]
    """Links between pairs of nodes (names in order) that differ from the narrower of their two networks."""
    currency: str
    """Unit of prices, such as ``USD``; prices are per hour."""
    budget_per_hour: float | None

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return the types, each once, in the order of the nodes."""
        return tuple(dict.fromkeys(node.device for node in self.nodes))

    @property
    def by_name(self) -> dict[str, Device]:
        return {node.device.name: node.device for node in self.nodes}

    @property
    def stock(self) -> dict[Device, int]:
        """Return the number of devices of each type."""
        return {device: sum(n.num_devices for n in self.nodes if n.device == device) for device in self.devices}

    @property
    def node_sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the number of devices of each node of a type, the largest first."""
        sizes: dict[str, list[int]] = {}
        for node in self.nodes:
            sizes.setdefault(node.device.name, []).append(node.num_devices)
        return {name: tuple(sorted(found, reverse=True)) for name, found in sizes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """The devices of a type that may be used."""

    device: str
    count: int
    price_per_hour: float | None
    node_sizes: tuple[int, ...] = ()
    """Number of devices of each node, the largest first; if empty, blocks of any size fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A planning problem in numbers, as the optimiser sees it."""

    supplies: tuple[Supply, ...]
    replica_kinds: tuple[ReplicaKind, ...]
    plans: tuple[TrainingPlan, ...]
    workload: WorkloadSpec
    max_staleness: int
    """The staleness bound, in policy versions."""
    budget_per_hour: float | None = None
    target_steps_per_s: float | None = None
    """Rate that the cheapest plan must reach; ``None`` asks for the fastest plan."""
    inside: tuple[str, ...] = ()
    """Types that train a whole copy in each of their nodes, so that new weights do not leave it."""
    tail: Tail = "none"
    """``soft``: the longest response keeps the staleness bound too; ``hard``: whenever it was admitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A limit that the solution reaches."""

    row: Literal["replicas", "trainer", "stock", "budget", "staleness", "cache", "tail"]
    subject: str
    """The device type or kind of replica that is limited; empty for the other limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The optimum; tuples run over the problem's kinds of replica."""

    plan: TrainingPlan
    replicas: tuple[int, ...]
    """y: number of replicas of each kind."""
    rates: tuple[float, ...]
    """x: samples/s that each kind decodes."""
    steps_per_s: float
    """lambda: training steps per second."""
    bound_steps_per_s: float
    """Rate that no listed choice exceeds on the links of phase 1, scaled to the links of a placement (cost passes: no
    choice that reaches the target is cheaper by more than the gap). Batch caps off the list may exceed it."""
    cost_per_hour: float | None
    staleness_needed: int
    """The smallest ``max_staleness`` under which this plan keeps its rate."""
    bindings: tuple[Binding, ...]
    gap: float
    """Relative distance between the solution and the proved bound."""
    solve_s: float

    @property
    def active(self) -> tuple[int, ...]:
        """Return the indices of the kinds in use."""
        return tuple(c for c, y in enumerate(self.replicas) if y)
