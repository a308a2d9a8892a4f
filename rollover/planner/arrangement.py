"""Decides which islands take which shares: swaps inside a class of equal (type, size), so that no count ever changes
(Kernighan and Lin 1970; Fiduccia and Mattheyses 1982).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from rollover.errors import PlanError
from rollover.planner.fabric import Fabric, Floats, Shares, Traffic

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

COARSE_ISLANDS = 512
"""Number of islands above which a graph is first solved with its islands matched in pairs."""
_PATIENCE = 64
"""Number of swaps without improvement after which a pass ends."""
_CANDIDATES = 32
"""Number of islands of each share among which a swap is searched for."""


def arrange(
    fabric: Fabric,
    shares: Sequence[Shares],
    traffic: Traffic,
    *,
    starts: int = 8,
    seed: int = 0,
    first: Sequence[int] | None = None,
) -> tuple[Shares, ...]:
    """Reassign the shares among islands of equal (type, size) for the highest score found.

    ``first`` is an order of the islands to start from, training ones first: ``metis_order``.
    """
    graph = _Graph.of(fabric, traffic)
    train, rollout = np.array([s.train for s in shares]), np.array([s.rollout for s in shares])
    found = _solve(graph, train, rollout, starts=starts, rng=np.random.default_rng(seed), first=first)
    return tuple(Shares(int(t), int(r)) for t, r in zip(*found, strict=True))


def metis_order(fabric: Fabric, shares: Sequence[Shares]) -> list[int]:
    """Return an order of the islands to start from: METIS bisects the graph in the proportion of the training share.

    Raises:
        PlanError: pymetis is not installed.
    """
    try:
        import pymetis
    except ImportError:
        raise PlanError("a METIS start needs pymetis: pip install 'rollover[metis]'") from None
    n = len(fabric.types)
    scaled = np.rint(1000 * fabric.bandwidth / fabric.bandwidth.max()).astype(int)
    neighbours = [[j for j in range(n) if j != i and scaled[i, j]] for i in range(n)]
    starts = np.cumsum([0, *(len(found) for found in neighbours)])
    share = sum(s.train for s in shares) / sum(fabric.sizes)
    cut = pymetis.part_graph(
        2,
        pymetis.CSRAdjacency(starts.tolist(), [j for found in neighbours for j in found]),
        vweights=list(fabric.sizes),
        eweights=[int(scaled[i, j]) for i, found in enumerate(neighbours) for j in found],
        tpwgts=[share, 1 - share],
    )
    return sorted(range(n), key=lambda i: cut.vertex_part[i])


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
        """Sum traffic x bandwidth over pairs of training devices, and over training-rollout pairs.

        A sum is a stand-in: collectives run at their narrowest link, which only re-costing on the real links sees.
        """
        pairs = (train @ self.links @ train - train @ self.links.diagonal()) / 2
        return float(self.train_weight * pairs + self.sync_weight * (train @ self.links @ rollout))

    def best_swap(
        self, train: Ints, rollout: Ints, pulls: tuple[Floats, Floats], free: Bools
    ) -> tuple[float, int, int]:
        """Return (gain, i, j) of the best exchange of shares between two free islands of a class; the gain is -inf
        where there is none.

        ``pulls`` are links @ train and links @ rollout. The gain is a term of i, a term of j and their link's: of many
        islands those with the largest own terms are tried, as Kernighan and Lin do.
        """
        best = (-math.inf, 0, 0)
        labels = np.stack([self.classes, train, rollout], axis=1)
        kinds = [(label, np.flatnonzero(free & (labels == label).all(axis=1))) for label in np.unique(labels, axis=0)]
        for (one, givers), (other, takers) in combinations(kinds, 2):
            if one[0] != other[0] or not len(givers) or not len(takers):
                continue
            dt, dr = int(other[1] - one[1]), int(other[2] - one[2])
            u = self._term(givers, dt, dr, pulls)
            v = self._term(takers, -dt, -dr, pulls)
            u_top, v_top = np.argsort(-u, kind="stable")[:_CANDIDATES], np.argsort(-v, kind="stable")[:_CANDIDATES]
            i, j = givers[u_top], takers[v_top]
            apart = (self.train_weight * dt + 2 * self.sync_weight * dr) * dt
            gains = u[u_top][:, None] + v[v_top][None, :] - apart * self.links[np.ix_(i, j)]
            at = np.unravel_index(int(np.argmax(gains)), gains.shape)
            if gains[at] > best[0]:
                best = (float(gains[at]), int(i[at[0]]), int(j[at[1]]))
        return best

    def _term(self, islands: Ints, dt: int, dr: int, pulls: tuple[Floats, Floats]) -> Floats:
        """Return what ``dt`` more training and ``dr`` more rollout devices in each of the islands add, all else as it
        is."""
        to_train, to_rollout, inside = pulls[0][islands], pulls[1][islands], self.links[islands, islands]
        pairs = dt * (to_train + (dt - 1) * inside / 2)
        cut = dt * to_rollout + dr * to_train + dt * dr * inside
        term: Floats = self.train_weight * pairs + self.sync_weight * cut
        return term


def _solve(
    graph: _Graph,
    train: Ints,
    rollout: Ints,
    *,
    starts: int,
    rng: np.random.Generator,
    first: Sequence[int] | None = None,
) -> tuple[Ints, Ints]:
    """Return the best of several starts, each refined; a large graph starts from the solution of its coarse one."""
    if len(train) > COARSE_ISLANDS:
        begun = [_from_coarse(graph, train, rollout, starts=starts, rng=rng)]
    else:
        begun = [_grown(graph, train, rollout, int(start)) for start in rng.permutation(len(train))[:starts]]
    if first is not None:
        begun.append(_assigned(graph, train, rollout, np.asarray(first)))
    refined = [_refine(graph, *start) for start in begun]
    return max(refined, key=lambda found: graph.score(*found))


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
    """Make passes of swaps until one brings nothing."""
    while (better := _pass(graph, train, rollout)) is not None:
        train, rollout = better
    return train, rollout


def _pass(graph: _Graph, train: Ints, rollout: Ints) -> tuple[Ints, Ints] | None:
    """Swap the best pair, even at a loss, and lock it, again and again; the best state on the way, if it is better."""
    train, rollout = train.copy(), rollout.copy()
    pulls = (graph.links @ train, graph.links @ rollout)
    free = np.ones(len(train), dtype=bool)
    gained, best, since = 0.0, 1e-9, 0
    found: tuple[Ints, Ints] | None = None
    while since <= _PATIENCE:
        gain, i, j = graph.best_swap(train, rollout, pulls, free)
        if not math.isfinite(gain):
            break
        for counts, pull in zip((train, rollout), pulls, strict=True):
            pull += (counts[j] - counts[i]) * (graph.links[:, i] - graph.links[:, j])
            counts[[i, j]] = counts[[j, i]]
        free[[i, j]] = False
        gained, since = gained + gain, since + 1
        if gained > best:
            best, since = gained, 0
            found = train.copy(), rollout.copy()
    return found


def _from_coarse(
    graph: _Graph, train: Ints, rollout: Ints, *, starts: int, rng: np.random.Generator
) -> tuple[Ints, Ints]:
    """Match islands of a class in pairs along the widest links, solve that graph, and take the pairs apart again."""
    pairs = _matching(graph)
    members = np.array([(p[0], p[-1]) for p in pairs])
    weights = np.array([len(p) for p in pairs])
    ends = graph.links[members[:, 0]] + graph.links[members[:, 1]]
    links = (ends[:, members[:, 0]] + ends[:, members[:, 1]]) / 4
    coarse = _Graph(
        classes=2 * graph.classes[members[:, 0]] + (weights - 1),
        links=links,
        train_weight=graph.train_weight,
        sync_weight=graph.sync_weight,
    )
    given = _assigned(graph, train, rollout, np.concatenate([np.array(p) for p in pairs]))
    found = _solve(
        coarse,
        np.array([sum(given[0][i] for i in p) for p in pairs]),
        np.array([sum(given[1][i] for i in p) for p in pairs]),
        starts=starts,
        rng=rng,
    )
    order = np.concatenate([np.array(pairs[k]) for k in np.argsort(-found[0], kind="stable")])
    return _assigned(graph, train, rollout, order)


def _matching(graph: _Graph) -> list[tuple[int, ...]]:
    """Match the islands of each class in pairs along heavy edges; at most one island of a class stays single."""
    pairs: list[tuple[int, ...]] = []
    free = np.ones(len(graph.classes), dtype=bool)
    for i in range(len(graph.classes)):
        if not free[i]:
            continue
        free[i] = False
        links = np.where(free & (graph.classes == graph.classes[i]), graph.links[i], -np.inf)
        partner = int(np.argmax(links))
        if math.isfinite(links[partner]):
            free[partner] = False
            pairs.append((i, partner))
        else:
            pairs.append((i,))
    return pairs
