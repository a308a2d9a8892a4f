"""A plan of the whole fleet, over small fleets: nothing that is added ever hurts."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rollover.devices.records import Device, Link
from rollover.errors import PlanError
from rollover.planner.plan import step_tokens
from rollover.planner.problem import PlanSpec
from rollover.planner.records import Fleet, Node
from rollover.planner.search import make_plan
from tests.planner.kit import MODEL, ONE_LENGTH, device, workload

SPEC = workload(num_groups=8)
GAPS = 2e-3
"""What two proved gaps may add up to."""


def fleet(network: float, *types: Device, counts: Sequence[int]) -> Fleet:
    """So many nodes of each type, joined by links of ``network`` bytes/s."""
    joined = [replace(made, network=Link(bytes_per_s=network, latency_s=2e-5)) for made in types]
    nodes = tuple(
        Node(name=f"{made.name}{i}", device=made, num_devices=made.node_size)
        for made, count in zip(joined, counts, strict=True)
        for i in range(count)
    )
    return Fleet(name="f", nodes=nodes, links=(), currency="USD", budget_per_hour=None)


FAST, SLOW = device("a", node_size=2), device("b", node_size=4, flops=100e12, price_per_hour=1.0)
SMALL = device("a", node_size=4, hbm_bytes=12e9, hbm_bytes_per_s=0.5e12, price_per_hour=1.0)
FLEETS = (
    (fleet(1e10, FAST, counts=(2,)), 1),
    (fleet(1e8, FAST, SLOW, counts=(1, 1)), 4),
    (fleet(1e7, SMALL, counts=(2,)), 0),
)
"""Nodes that are alike, two types on a narrow network, and devices so small that a model is divided; each with a
bound on staleness."""


@functools.cache
def rate(fleet: Fleet, max_staleness: int) -> float:
    """Steps/s on the real links; 0 where there is no plan."""
    try:
        return make_plan(fleet, PlanSpec(model=MODEL, workload=SPEC, max_staleness=max_staleness)).solution.steps_per_s
    except PlanError:
        return 0.0


def changed(fleet: Fleet, **factors: float) -> Fleet:
    """With so many times as much of a figure of every device, or of the network."""

    def better(node: Node) -> Node:
        made = node.device
        scaled = {key: getattr(made, key) * factor for key, factor in factors.items() if key != "network"}
        width = made.network.bytes_per_s * factors.get("network", 1.0)
        return replace(node, device=replace(made, network=replace(made.network, bytes_per_s=width), **scaled))

    return replace(fleet, nodes=tuple(map(better, fleet.nodes)))


STEP_FLOPS = 4 * 64 * 300 * (2 * 9e8 + 4 * 4 * 1024 * 150)
"""A forward pass, a backward pass of twice its size and one for proximal log-probs, over 64 samples of 300 tokens."""
LATENCY_S = 0.05
Trainers = dict[str, tuple[int, float]]
"""Number of devices and FLOP/s by the name of a node."""
Links = dict[tuple[str, str], float]


def fleet_of(trainers: Trainers, links: Links) -> Fleet:
    """Return nodes that lack nothing but FLOP/s and wide links, and a node ``r`` that can only decode."""
    wide = Link(bytes_per_s=1e16, latency_s=0.0)
    base = device(hbm_bytes_per_s=1e16, hbm_bytes=1e15, link=wide, network=wide)
    made = {name: replace(base, name=name, node_size=n, flops=flops) for name, (n, flops) in trainers.items()}
    made["r"] = replace(base, name="r", node_size=1, flops=1e18, hbm_bytes=8e9)
    nodes = tuple(Node(name=name, device=one, num_devices=one.node_size) for name, one in made.items())
    linked = tuple((*ends, Link(bytes_per_s=width, latency_s=LATENCY_S)) for ends, width in links.items())
    return Fleet(name="f", nodes=nodes, links=linked, currency="USD", budget_per_hour=None)


@pytest.mark.parametrize(
    ("trainers", "links"),
    [
        ({"a": (2, 2e12), "b": (2, 1e12)}, {("a", "b"): 1e10}),
        ({"a": (2, 2e12), "b": (2, 1e12)}, {("a", "b"): 1.25e6}),
        ({"a": (2, 1e12), "b": (1, 2e12)}, {("a", "b"): 6e7}),
        ({"a": (1, 2e12), "b": (1, 2e12), "c": (1, 3e12)}, {("a", "b"): 1e10, ("b", "c"): 1e8, ("a", "c"): 1e10}),
        ({"a": (2, 1e12), "b": (1, 2e12), "c": (4, 0.5e12)}, {("a", "b"): 1e9, ("b", "c"): 1e9, ("a", "c"): 5e8}),
    ],
)
def test_types_that_train_sum_gradients_over_the_links_between_them(trainers: Trainers, links: Links) -> None:
    """Enumerated by hand: of all sets of nodes the one whose passes, and 2 GB of gradients twice around a ring over the
    narrowest of its links, take the least."""

    def step_s(nodes: Sequence[str]) -> float:
        narrowest = min([width for ends, width in links.items() if {*ends} <= {*nodes}], default=0.0)
        ring_s = 2 * (1 - 1 / len(nodes)) * 2e9 / narrowest + LATENCY_S if narrowest else 0.0
        return STEP_FLOPS / sum(math.prod(trainers[name]) for name in nodes) + ring_s

    sets = [nodes for n in range(len(trainers)) for nodes in itertools.combinations(trainers, n + 1)]
    spec = PlanSpec(model=MODEL, workload=workload(buckets=(ONE_LENGTH,)), max_staleness=4)
    plan = make_plan(fleet_of(trainers, links), spec).solution.plan
    assert tuple(part.device for part in plan.parts) == min(sets, key=step_s)
    assert plan.step_s == pytest.approx(min(map(step_s, sets)), rel=1e-3)


def test_a_target_counts_on_the_links_of_the_placement() -> None:
    """Phase 1 expects wide networks, but the link is narrow: what only phase 1 promises is refused."""
    narrow = fleet_of({"a": (2, 4e12), "b": (2, 2e12)}, {("a", "b"): 1e7})
    spec = PlanSpec(model=MODEL, workload=workload(), max_staleness=4)
    fastest = make_plan(narrow, spec).solution.steps_per_s
    assert make_plan(narrow, replace(spec, target_steps_per_s=0.995 * fastest)).solution.steps_per_s > 0.99 * fastest
    with pytest.raises(PlanError):
        make_plan(narrow, replace(spec, target_steps_per_s=1.05 * fastest))


def test_a_refused_target_is_told_the_rate_of_the_fastest_part() -> None:
    """One of the nodes alone has 56 times the rate of both over the link between them."""
    two = fleet(1e7, FAST, counts=(2,))
    told = f"the fastest has {rate(two, 1) * step_tokens(SPEC):,.0f} tokens/s"
    with pytest.raises(PlanError, match=told):
        make_plan(two, PlanSpec(model=MODEL, workload=SPEC, max_staleness=1, target_steps_per_s=100.0))


@pytest.mark.parametrize("counts", [(1, 1), (8, 1)])
def test_the_cheapest_of_almost_equal_parts_is_chosen(counts: tuple[int, int]) -> None:
    """A reward of 100 s leaves a faster device nothing to gain."""
    dear, cheap = (
        replace(FAST, name="d", price_per_hour=3.0, flops=1.05 * FAST.flops),
        replace(FAST, price_per_hour=1.0),
    )
    spec = PlanSpec(model=MODEL, workload=replace(SPEC, reward_s=100.0), max_staleness=1)
    plans = [make_plan(fleet(1e8, *types, counts=counts[: len(types)]), spec) for types in ((dear,), (dear, cheap))]
    assert plans[0].solution.steps_per_s * (1 - GAPS) < plans[1].solution.steps_per_s < plans[0].solution.steps_per_s
    assert plans[1].used == {"a": 2} and plans[1].cost_per_hour == 2.0


@pytest.mark.parametrize("number", [0, 5, 23, 29, 40, 42])
def test_small_fleets_are_planned_as_well_as_by_enumeration(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They need both roles in a node, beside a node with one role or alone, a batch cap off the list, a trainer over
    three types, and nodes that are not divided into equal parts."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    enumerated = importlib.import_module("plan_gap")
    fleet, spec = enumerated.drawn(number)
    assert make_plan(fleet, spec).solution.steps_per_s >= 0.99 * enumerated.Best(fleet, spec).rate()


TIGHT = 5.0
"""The budget per hour of a fleet before it grows."""
MORE: dict[str, Callable[[Fleet, int], tuple[Fleet, int]]] = {
    "a node": lambda fleet, bound: (replace(fleet, nodes=(*fleet.nodes, replace(fleet.nodes[-1], name="new"))), bound),
    "a device in a node": lambda fleet, bound: (with_a_larger_node(fleet), bound),
    "network": lambda fleet, bound: (changed(fleet, network=3.0), bound),
    "bandwidth of memory": lambda fleet, bound: (changed(fleet, hbm_bytes_per_s=1.5), bound),
    "memory": lambda fleet, bound: (changed(fleet, hbm_bytes=1.5), bound),
    "compute": lambda fleet, bound: (changed(fleet, flops=1.5), bound),
    "staleness": lambda fleet, bound: (fleet, bound + 1),
    "lower prices": lambda fleet, bound: (changed(replace(fleet, budget_per_hour=TIGHT), price_per_hour=0.8), bound),
    "a budget": lambda fleet, bound: (replace(fleet, budget_per_hour=TIGHT * 1.3), bound),
}


def with_a_larger_node(fleet: Fleet) -> Fleet:
    *rest, node = fleet.nodes
    count = node.num_devices + 1
    larger = replace(node, device=replace(node.device, node_size=count), num_devices=count)
    return replace(fleet, nodes=(*rest, larger))


@pytest.mark.parametrize("more", MORE)
def test_nothing_that_is_added_ever_hurts(more: str) -> None:
    for fleet, max_staleness in FLEETS:
        before = replace(fleet, budget_per_hour=TIGHT) if more in ("lower prices", "a budget") else fleet
        assert rate(*MORE[more](fleet, max_staleness)) >= rate(before, max_staleness) * (1 - GAPS)
