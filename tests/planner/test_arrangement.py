"""Phase 2 against exhaustive search, and the counts it may never change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.errors import PlanError
from rollover.planner.arrangement import Demand, Shares, Traffic, arrange, compose
from rollover.planner.topology import Fabric


def fabric(types: list[str], sizes: list[int], rng: np.random.Generator) -> Fabric:
    """Links drawn in clusters, as real fabrics have them: wide inside an island, less in a rack, less beyond."""
    n = len(types)
    rack = rng.integers(0, max(1, n // 3) + 1, n)
    links = np.where(rack[:, None] == rack[None, :], 50.0, 12.0) * rng.uniform(0.5, 1.5, (n, n))
    links = (links + links.T) / 2
    np.fill_diagonal(links, rng.uniform(200, 450, n))
    return Fabric(types=tuple(types), sizes=tuple(sizes), bandwidth=links * 1e9)


def partition(fab: Fabric, demands: Mapping[str, Demand], traffic: Traffic) -> tuple[Shares, ...]:
    return arrange(fab, compose(fab, demands), traffic)


def score(fab: Fabric, shares: Sequence[Shares], traffic: Traffic) -> float:
    """Traffic x bandwidth over pairs of training devices, and over training-rollout pairs."""
    train, rollout = np.array([s.train for s in shares]), np.array([s.rollout for s in shares])
    pairs = (train @ fab.bandwidth @ train - train @ fab.bandwidth.diagonal()) / 2
    return float(traffic.train * pairs + traffic.sync * (train @ fab.bandwidth @ rollout))


def best_score(fab: Fabric, shares: tuple[Shares, ...], traffic: Traffic) -> float:
    """Every way to deal the shares among islands of equal type and size."""
    kinds = list(zip(fab.types, fab.sizes, strict=True))
    members = [[i for i, k in enumerate(kinds) if k == kind] for kind in dict.fromkeys(kinds)]

    def deal(left: list[list[int]], dealt: dict[int, Shares]) -> float:
        if not left:
            return score(fab, [dealt[i] for i in range(len(kinds))], traffic)
        first, *rest = left
        ways = set(permutations([shares[i] for i in first]))
        return max(deal(rest, {**dealt, **dict(zip(first, way, strict=True))}) for way in ways)

    return deal(members, {})


@st.composite
def problems(draw: st.DrawFn) -> tuple[Fabric, dict[str, Demand], Traffic]:
    n = draw(st.integers(2, 8))
    types = sorted(draw(st.lists(st.sampled_from("ab"), min_size=n, max_size=n)))
    fab = fabric(types, [8] * n, np.random.default_rng(draw(st.integers(0, 10_000))))
    demands = {}
    for kind in set(types):
        blocks = types.count(kind) * 2
        train = draw(st.integers(0, blocks))
        replicas = draw(st.integers(0, blocks - train))
        demands[kind] = Demand(train_devices=4 * train, train_block=4, replica_blocks={4: replicas})
    weights = draw(st.tuples(st.floats(0.0, 1.0), st.floats(0.01, 1.0)))
    return fab, demands, Traffic(train=weights[0], sync=weights[1])


@settings(max_examples=60, deadline=None)
@given(problems())
def test_swaps_find_the_exhaustive_optimum_of_small_fleets(problem: tuple[Fabric, dict[str, Demand], Traffic]) -> None:
    fab, demands, traffic = problem
    shares = partition(fab, demands, traffic)
    assert score(fab, shares, traffic) == pytest.approx(best_score(fab, shares, traffic), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_counts_per_type_are_exact_and_blocks_fit(problem: tuple[Fabric, dict[str, Demand], Traffic]) -> None:
    fab, demands, traffic = problem
    shares = partition(fab, demands, traffic)
    for kind, demand in demands.items():
        mine = [s for s, t in zip(shares, fab.types, strict=True) if t == kind]
        assert sum(s.train for s in mine) == demand.train_devices
        assert sum(s.rollout for s in mine) == demand.rollout_devices
        assert all(s.train + s.rollout <= 8 and s.train % 4 == 0 and s.rollout % 4 == 0 for s in mine)
        # Three roles (idle is one) need at most two islands that hold more than one of them.
        assert sum(len({s.train, s.rollout, 8 - s.train - s.rollout} - {0, 8}) > 0 for s in mine) <= 2


def test_an_island_is_split_only_when_counts_force_it() -> None:
    fab = fabric(["a"] * 4, [8, 8, 4, 4], np.random.default_rng(0))
    shares = compose(fab, {"a": Demand(train_devices=12, train_block=4, replica_blocks={4: 3})})
    assert sorted((s.train, s.rollout) for s in shares) == [(0, 4), (0, 8), (4, 0), (8, 0)]
    forced = compose(fab, {"a": Demand(train_devices=14, train_block=2, replica_blocks={2: 5})})
    assert sum(s.train > 0 and s.rollout > 0 for s in forced) == 1


def test_what_no_island_can_hold_is_refused_in_words() -> None:
    fab = fabric(["a"] * 3, [4] * 3, np.random.default_rng(0))
    with pytest.raises(PlanError, match=r"a: islands \(3 of 4\) cannot hold 0 training devices .* \{8: 1\}"):
        compose(fab, {"a": Demand(replica_blocks={8: 1})})


def test_the_best_rack_of_a_large_fleet_is_found() -> None:
    """The widest 8 of 32 islands, hidden in a shuffled order."""
    rng = np.random.default_rng(3)
    rack = rng.permutation(np.repeat(np.arange(4), 8))
    links = np.where(rack[:, None] == rack[None, :], 50.0, 5.0)
    links[np.ix_(rack == 2, rack == 2)] = 60.0
    np.fill_diagonal(links, 400.0)
    fab = Fabric(types=("a",) * 32, sizes=(8,) * 32, bandwidth=links)
    demand = {"a": Demand(train_devices=64, train_block=8, replica_blocks={4: 48})}
    shares = partition(fab, demand, Traffic(train=1.0, sync=0.05))
    assert {int(rack[i]) for i, s in enumerate(shares) if s.train} == {2}


def test_inside_islands_every_rollout_stands_beside_training() -> None:
    """Without it, whole islands take one role each."""
    fab = fabric(["a"] * 4, [4] * 4, np.random.default_rng(0))
    demands = {"a": Demand(train_devices=8, replica_blocks={1: 8})}
    assert sorted((s.train, s.rollout) for s in compose(fab, demands)) == [(0, 4), (0, 4), (4, 0), (4, 0)]
    assert not [s for s in compose(fab, demands, inside=["a"]) if s.rollout and not s.train]


def test_the_same_fleet_gets_the_same_partition() -> None:
    fab = fabric(["a"] * 12 + ["b"] * 12, [8] * 24, np.random.default_rng(5))
    demand = {k: Demand(train_devices=32, train_block=8, replica_blocks={8: 6}) for k in "ab"}
    found = [partition(fab, demand, Traffic(train=1.0, sync=0.2)) for _ in range(2)]
    assert found[0] == found[1]
