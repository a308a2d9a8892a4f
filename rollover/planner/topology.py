"""The fleet as a graph of nodes: how wide the real links are between the machines that a plan uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import numpy.typing as npt

from rollover.devices.costs.links import narrowest
from rollover.devices.records import Link
from rollover.planner.records import Fleet

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The graph of islands."""

    types: tuple[str, ...]
    """Device type of each island."""
    sizes: tuple[int, ...]
    """Number of devices in each island."""
    bandwidth: Floats
    """(islands, islands), bytes/s one way between a device of each; on the diagonal between two devices inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Links between nodes, which are numbered as in the fleet."""

    fleet: Fleet
    widths: Floats
    """(nodes, nodes), bytes/s one way between two nodes; on the diagonal between two devices of one."""
    latencies: Floats
    """(nodes, nodes), seconds."""

    @classmethod
    def of(cls, fleet: Fleet) -> Topology:
        networks = np.array([n.device.network.bytes_per_s for n in fleet.nodes])
        delays = np.array([n.device.network.latency_s for n in fleet.nodes])
        widths, latencies = np.minimum.outer(networks, networks), np.maximum.outer(delays, delays)
        index = {node.name: i for i, node in enumerate(fleet.nodes)}
        for a, b, link in fleet.links:
            for at in ((index[a], index[b]), (index[b], index[a])):
                widths[at], latencies[at] = link.bytes_per_s, link.latency_s
        np.fill_diagonal(widths, [n.device.link.bytes_per_s for n in fleet.nodes])
        np.fill_diagonal(latencies, [n.device.link.latency_s for n in fleet.nodes])
        return cls(fleet=fleet, widths=widths, latencies=latencies)

    def fabric(self) -> Fabric:
        """Return the nodes as islands. A node's devices share its network."""
        sizes = np.array([n.num_devices for n in self.fleet.nodes])
        shared = self.widths / np.maximum.outer(sizes, sizes)
        np.fill_diagonal(shared, self.widths.diagonal())
        return Fabric(
            types=tuple(n.device.name for n in self.fleet.nodes), sizes=tuple(sizes.tolist()), bandwidth=shared
        )

    def link(self, a: int, b: int) -> Link:
        """Return the link between two nodes, or inside one."""
        return Link(bytes_per_s=float(self.widths[a, b]), latency_s=float(self.latencies[a, b]))

    def narrowest(self, pairs: Iterable[tuple[int, int]]) -> Link | None:
        """Return the narrowest of the links between different nodes; ``None`` where there is none."""
        return narrowest(self.link(a, b) for a, b in pairs if a != b)

    def across(self) -> dict[tuple[str, str], Link]:
        """Return, for each pair of types in either order, the widest link between a node of each."""
        types = np.array([node.device.name for node in self.fleet.nodes])
        found = {}
        for a, b in permutations(dict.fromkeys(types.tolist()), 2):
            of_a, of_b = np.flatnonzero(types == a), np.flatnonzero(types == b)
            row, column = divmod(int(np.argmax(self.widths[np.ix_(of_a, of_b)])), len(of_b))
            found[a, b] = self.link(int(of_a[row]), int(of_b[column]))
        return found

    def chain(self, nodes: Sequence[int]) -> list[int]:
        """Sort the nodes so that neighbours are joined by wide links, each time along the widest link onwards."""
        left = sorted(nodes)
        order = [left.pop(0)]
        while left:
            last = order[-1]
            after = max(left, key=lambda node: (self.widths[last, node], -node))
            left.remove(after)
            order.append(after)
        return order

    def broadcast(self, sources: Sequence[int], targets: Sequence[int]) -> dict[int, Link | None]:
        """Return for each target the narrowest link on the widest way from a source, by way of other targets where that
        is wider: the speed of a pipelined broadcast of weights. ``None`` for a target that is a source."""
        reached: dict[int, Link | None] = dict.fromkeys(sources)
        waiting = [t for t in targets if t not in reached]
        while waiting:
            joined = list(reached)
            links = self.widths[np.ix_(joined, waiting)]
            at = np.unravel_index(int(np.argmax(links)), links.shape)
            near, far = joined[int(at[0])], waiting[int(at[1])]
            reached[far] = narrowest((reached[near], self.link(near, far)))
            waiting.remove(far)
        return {target: reached[target] for target in targets}
