"""Parts of a fleet that may do better alone: a plan on all nodes reckons with the links between them, and a slow one
costs more than the nodes beyond it bring.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rollover.devices.records import Link
from rollover.planner.records import Fleet
from rollover.planner.topology import Topology

MOST = 48
"""Parts that are looked at, where there are more by their numbers of nodes of each kind."""


def parts(fleet: Fleet) -> list[tuple[int, ...]]:
    """List the nodes of each part that may deserve a plan of its own, the smallest first, never all of them.

    Of nodes that stand alike, any number: every combination of numbers, where there are no more than ``MOST``, else one
    node, half of them or all, of one kind or two. Further the islands: nodes joined by links of some width or more.
    """
    if len(fleet.nodes) == 1:
        return []
    topology = Topology.of(fleet)
    kinds = _kinds(fleet, topology)
    found = [tuple(sorted(itertools.chain(*taken))) for taken in _taken(kinds)]
    found += _islands(topology)
    whole = len(fleet.nodes)
    return sorted({nodes for nodes in found if 0 < len(nodes) < whole}, key=lambda nodes: (len(nodes), nodes))


def alone(fleet: Fleet, nodes: Sequence[int]) -> Fleet:
    """The part as a fleet."""
    kept = tuple(fleet.nodes[i] for i in nodes)
    names = {node.name for node in kept}
    return replace(fleet, nodes=kept, links=tuple(link for link in fleet.links if {link[0], link[1]} <= names))


def inside(fleet: Fleet) -> dict[str, Link]:
    """Return the links of a fleet of one node, which nothing leaves; none for larger fleets."""
    return {node.device.name: node.device.link for node in fleet.nodes} if len(fleet.nodes) == 1 else {}


def widest(fleet: Fleet) -> dict[str, Link]:
    """Links than which no plan on the fleet meets a wider one, inside a node or between two."""
    topology = Topology.of(fleet)
    best = Link(bytes_per_s=float(topology.widths.max()), latency_s=float(topology.latencies.min()))
    return {device.name: best for device in fleet.devices}


def _kinds(fleet: Fleet, topology: Topology) -> list[list[int]]:
    """Nodes of one device with equal links."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for i, node in enumerate(fleet.nodes):
        links = tuple(sorted(zip(topology.widths[i].tolist(), topology.latencies[i].tolist(), strict=True)))
        kinds.setdefault((node.device.name, links), []).append(i)
    return list(kinds.values())


def _taken(kinds: list[list[int]]) -> Iterator[Sequence[Sequence[int]]]:
    """Return how many of each kind are taken."""
    if np.prod([float(len(nodes) + 1) for nodes in kinds]) <= MOST:
        yield from itertools.product(*([nodes[:n] for n in range(len(nodes) + 1)] for nodes in kinds))
        return
    sizes = [[nodes[:n] for n in sorted({1, len(nodes) // 2, len(nodes)} - {0})] for nodes in kinds]
    for pair in itertools.combinations_with_replacement(sizes, 2):
        yield from itertools.product(*(pair if pair[0] is not pair[1] else pair[:1]))


def _islands(topology: Topology) -> list[tuple[int, ...]]:
    """Nodes that links of at least some width join, whatever the width."""
    widths = topology.widths.copy()
    np.fill_diagonal(widths, 0.0)
    found = []
    for width in np.unique(widths[widths > 0]):
        label = np.arange(len(widths))
        for node in range(len(widths)):
            joined = _reached(widths >= width, node)
            label[joined] = label[joined].min()
        found += [tuple(np.flatnonzero(label == one).tolist()) for one in np.unique(label)]
    return found


def _reached(joined: npt.NDArray[np.bool_], node: int) -> npt.NDArray[np.bool_]:
    """The nodes that a way leads to."""
    seen = np.zeros(len(joined), dtype=bool)
    seen[node] = True
    while True:
        more = seen | joined[seen].any(axis=0)
        if (more == seen).all():
            return seen
        seen = more
