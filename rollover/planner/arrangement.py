"""Decides which islands take which shares: exchanges inside a class of equal (type, size), so that no count ever
changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from rollover.errors import PlanError
from rollover.planner.topology import Fabric, Floats

Ints = npt.NDArray[np.int64]

_STARTS = 16
"""Number of starts that are refined."""
_MANY_ISLANDS = 512
"""Number of islands above which one start is refined instead of several."""
_LEAST_GAIN = 1e-9
"""Smallest gain for which shares are exchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The devices of one type that training and rollout need."""

    train_devices: int = 0
    train_block: int = 1
    """Number of devices of a training stage that must share an island (tensor parallel)."""
    replica_blocks: Mapping[int, int]
    """Number of devices of a replica's stage that must share an island -> number of such blocks."""

    @property
    def rollout_devices(self) -> int:
        return sum(block * count for block, count in self.replica_blocks.items())


@dataclass(frozen=True, slots=True)
class Shares:
    """The numbers of devices of an island that train and that generate rollouts; the rest are idle."""

    train: int
    rollout: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that one training step moves inside the training set and out of it."""

    train: float
    """Traffic inside the training set: data-parallel and pipeline."""
    sync: float
    """Traffic from the training set to the rollout set."""


def compose(fabric: Fabric, demands: Mapping[str, Demand], *, inside: Collection[str] = ()) -> tuple[Shares, ...]:
    """Return shares that meet the demand exactly, with the fewest islands split between roles, then the fewest
    training; of the types ``inside``, first of all with the fewest that roll out without training.

    Block sizes are assumed to divide one another (powers of two): then blocks fit iff for each size enough of it
    fits, and the rows below say so exactly.
    """
    shares = [Shares(0, 0)] * len(fabric.types)
    for device in dict.fromkeys(fabric.types):
        demand = demands.get(device)
        if demand is None:
            continue
        members = sorted((i for i, t in enumerate(fabric.types) if t == device), key=lambda i: -fabric.sizes[i])
        classes = [(size, list(found)) for size, found in groupby(members, key=lambda i: fabric.sizes[i])]
        for (_, islands), taken in zip(classes, _composition(device, classes, demand, device in inside), strict=True):
            for island, share in zip(islands, taken, strict=True):
                shares[island] = share
    return tuple(shares)


def _composition(
    device: str, classes: Sequence[tuple[int, Sequence[int]]], demand: Demand, inside: bool
) -> list[list[Shares]]:
    """Return, for each class of equal islands, the shares of its members, most training first."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    block = demand.train_block
    options = [
        (c, Shares(train, rollout))
        for c, (size, _) in enumerate(classes)
        for train in range(0, size + 1, block)
        for rollout in range(0, size - train + 1)
    ]
    sizes = [classes[c][0] for c, _ in options]
    roles = [
        (s.train > 0) + (s.rollout > 0) + (s.train + s.rollout < size)
        for (_, s), size in zip(options, sizes, strict=True)
    ]
    cost = [r - 1 + 1e-3 * (s.train > 0) for r, (_, s) in zip(roles, options, strict=True)]
    if inside:
        cost = [float(s.rollout > 0 and not s.train) + 1e-3 * c for c, (_, s) in zip(cost, options, strict=True)]
    rows = [[float(c == k) for c, _ in options] for k in range(len(classes))]
    lower = [float(len(islands)) for _, islands in classes]
    upper = list(lower)
    for row, total in (
        ([float(s.train) for _, s in options], demand.train_devices),
        ([float(s.rollout) for _, s in options], demand.rollout_devices),
    ):
        rows.append(row)
        lower.append(total)
        upper.append(total)
    for size in demand.replica_blocks:
        rows.append([float(s.rollout // size) for _, s in options])
        lower.append(sum(b * n for b, n in demand.replica_blocks.items() if b >= size) / size)
        upper.append(np.inf)
    found = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), lower, upper),
        integrality=np.ones(len(options), dtype=np.int64),
        bounds=Bounds(0, max(len(islands) for _, islands in classes)),
    )
    if found.x is None:
        islands = " and ".join(f"{len(members)} of {size}" for size, members in classes)
        raise PlanError(
            f"{device}: islands ({islands}) cannot hold {demand.train_devices} training devices in blocks of {block}"
            f" and rollout blocks {dict(sorted(demand.replica_blocks.items()))} (size: count)"
        )
    counts = np.rint(found.x).astype(int)
    taken: list[list[Shares]] = [[] for _ in classes]
    for (c, share), count in zip(options, counts, strict=True):
        taken[c] += [share] * count
    return [sorted(found, key=lambda s: (-s.train, -s.rollout)) for found in taken]


def arrange(fabric: Fabric, shares: Sequence[Shares], traffic: Traffic) -> tuple[Shares, ...]:
    """Reassign the shares among islands of equal (type, size) for the highest score found."""
    graph = _Graph.of(fabric, traffic)
    train, rollout = np.array([s.train for s in shares]), np.array([s.rollout for s in shares])
    begun = np.random.default_rng(0).permutation(len(shares))[: _STARTS if len(shares) <= _MANY_ISLANDS else 1]
    refined = [_refine(graph, *_grown(graph, train, rollout, int(start))) for start in begun]
    found = max(refined, key=lambda shares: graph.score(*shares))
    return tuple(Shares(int(t), int(r)) for t, r in zip(*found, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """Islands as the search sees them."""

    classes: Ints
    """(islands,): shares may be swapped within a class only."""
    links: Floats
    """(islands, islands), scaled to at most 1."""
    train_weight: float
    sync_weight: float

    @classmethod
    def of(cls, fabric: Fabric, traffic: Traffic) -> _Graph:
        kinds = list(zip(fabric.types, fabric.sizes, strict=True))
        index = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
        total = traffic.train + traffic.sync or 1.0
        return cls(
            classes=np.array([index[kind] for kind in kinds]),
            links=fabric.bandwidth / (fabric.bandwidth.max(initial=0.0) or 1.0),
            train_weight=traffic.train / total,
            sync_weight=traffic.sync / total,
        )

    def score(self, train: Ints, rollout: Ints) -> float:
        """Sum traffic x bandwidth over pairs of training devices, and over training-rollout pairs. A sum is a stand-in:
        collectives run at their narrowest link, which only re-costing on the real links sees."""
        pairs = (train @ self.links @ train - train @ self.links.diagonal()) / 2
        return float(self.train_weight * pairs + self.sync_weight * (train @ self.links @ rollout))

    def gains(self, i: int, train: Ints, rollout: Ints, to_train: Floats, to_rollout: Floats) -> Floats:
        """Return (islands,): how much an exchange of shares with island ``i`` adds to the score; -inf for those of
        another class. ``to_train`` is links @ train, ``to_rollout`` is links @ rollout."""
        dt, dr, own = train - train[i], rollout - rollout[i], self.links.diagonal()
        pairs = dt * (to_train[i] - to_train + (dt - 1) * own[i] / 2 + (dt + 1) * own / 2 - dt * self.links[i])
        cut = dt * (to_rollout[i] - to_rollout) + dr * (to_train[i] - to_train)
        cut += dt * dr * (own[i] + own - 2 * self.links[i])
        gains: Floats = self.train_weight * pairs + self.sync_weight * cut
        return np.where(self.classes == self.classes[i], gains, -np.inf)


def _assigned(graph: _Graph, train: Ints, rollout: Ints, order: Ints) -> tuple[Ints, Ints]:
    """Hand out the shares of each class in the given order of islands, most training first."""
    new_train, new_rollout = train.copy(), rollout.copy()
    for kind in np.unique(graph.classes):
        members = order[graph.classes[order] == kind]
        ranked = members[np.lexsort((-rollout[members], -train[members]))]
        new_train[members], new_rollout[members] = train[ranked], rollout[ranked]
    return new_train, new_rollout


def _grown(graph: _Graph, train: Ints, rollout: Ints, start: int) -> tuple[Ints, Ints]:
    """Grow a set of islands from ``start`` along the widest links, and hand out the shares in that order."""
    order = [start]
    pull = graph.links[start].copy()
    pull[start] = -np.inf
    while len(order) < len(train):
        nearest = int(np.argmax(pull))
        order.append(nearest)
        pull += graph.links[nearest]
        pull[nearest] = -np.inf
    return _assigned(graph, train, rollout, np.array(order))


def _refine(graph: _Graph, train: Ints, rollout: Ints) -> tuple[Ints, Ints]:
    """Exchange the shares of two islands wherever that raises the score, until no exchange does."""
    to_train, to_rollout = graph.links @ train, graph.links @ rollout
    settled = 0
    while settled < len(train):
        for i in range(len(train)):
            gains = graph.gains(i, train, rollout, to_train, to_rollout)
            j = int(np.argmax(gains))
            settled = 0 if gains[j] > _LEAST_GAIN else settled + 1
            if gains[j] > _LEAST_GAIN:
                for counts, pull in ((train, to_train), (rollout, to_rollout)):
                    pull += (counts[j] - counts[i]) * (graph.links[:, i] - graph.links[:, j])
                    counts[[i, j]] = counts[[j, i]]
    return train, rollout
