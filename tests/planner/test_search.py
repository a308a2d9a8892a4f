"""A plan of the whole fleet, over random small fleets: nothing that is added ever hurts."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from rollover.devices.records import LengthBucket, Link
from rollover.errors import PlanError
from rollover.planner.problem import PlanSpec
from rollover.planner.records import Fleet, Node
from rollover.planner.search import make_plan
from tests.planner.kit import MODEL, device, workload

SPEC = workload(num_groups=8)
GAPS = 2e-3
"""What two proved gaps may add up to."""


@st.composite
def fleets(draw: st.DrawFn, sizes: Sequence[int] = (1, 2, 4)) -> Fleet:
    """Up to four nodes of two types, joined by links from Ethernet to better than their own."""
    network = Link(bytes_per_s=draw(st.sampled_from([1e7, 1e8, 1e9, 1e10, 1e11])), latency_s=2e-5)
    types = [
        device(
            name,
            flops=draw(st.sampled_from([100e12, 400e12, 1000e12])),
            hbm_bytes_per_s=draw(st.sampled_from([0.5e12, 2e12, 4e12])),
            hbm_bytes=draw(st.sampled_from([12e9, 24e9, 80e9])),
            node_size=draw(st.sampled_from(sizes)),
            network=network,
            price_per_hour=draw(st.sampled_from([0.5, 1.0, 3.0])),
        )
        for name in ("a", "b")
    ]
    counts = draw(st.sampled_from([(1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (3, 0)]))
    nodes = [
        Node(name=f"{made.name}{i}", device=made, num_devices=made.node_size)
        for made, count in zip(types, counts, strict=True)
        for i in range(count)
    ]
    return Fleet(name="f", nodes=tuple(nodes), links=(), currency="USD", budget_per_hour=None)


BOUNDS = st.sampled_from([0, 1, 4])


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


def of_two_types(network: float, link: float) -> Fleet:
    """Two nodes of two devices, with ``link`` bytes/s between them although both have a ``network``."""
    a = device("a", node_size=2, flops=4e12, hbm_bytes=1e15, network=Link(bytes_per_s=network, latency_s=0.0))
    nodes = tuple(Node(name=d.name, device=d, num_devices=2) for d in (a, replace(a, name="b", flops=2e12)))
    links = (("a", "b", Link(bytes_per_s=link, latency_s=0.25)),)
    return Fleet(name="f", nodes=nodes, links=links, currency="USD", budget_per_hour=None)


def test_two_types_sum_gradients_over_the_link_between_their_nodes() -> None:
    """By hand: passes over 64 sequences of 300 tokens on 2 x 4 + 2 TFLOP/s, then 2 GB of gradients at 10 GB/s."""
    one = LengthBucket(
        share=1.0, tokens=200, max_tokens=400, group_share=1.0, group_tokens=300, batch_share=1.0, batch_tokens=380
    )
    spec = PlanSpec(model=MODEL, workload=workload(buckets=(one,)), max_staleness=4)
    passes_s = 4 * 64 * 300 * (2 * 9e8 + 4 * 4 * 1024 * 150) / 10e12
    optimizer_s = 2 * 16 * 1e9 / 2e12
    wide = make_plan(of_two_types(network=1e7, link=1e10), spec).solution.plan
    assert [(part.device, part.num_devices) for part in wide.parts] == [("a", 2), ("b", 1)]
    assert passes_s + 0.45 < wide.step_s < passes_s + 0.45 + optimizer_s
    narrow = make_plan(of_two_types(network=1e10, link=1e7), spec).solution.plan
    assert [part.device for part in narrow.parts] == ["a"]  # 2 GB would take 200 s


def test_a_target_counts_on_the_links_of_the_placement() -> None:
    """Phase 1 expects wide networks, but the link is narrow: what only phase 1 promises is refused."""
    narrow = of_two_types(network=1e10, link=1e7)
    spec = PlanSpec(model=MODEL, workload=workload(), max_staleness=4)
    fastest = make_plan(narrow, spec).solution.steps_per_s
    assert make_plan(narrow, replace(spec, target_steps_per_s=0.995 * fastest)).solution.steps_per_s > 0.99 * fastest
    with pytest.raises(PlanError):
        make_plan(narrow, replace(spec, target_steps_per_s=1.05 * fastest))


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
    @settings(max_examples=3, deadline=None, derandomize=True)
    @seed(sorted(MORE).index(more))
    @given(fleets(sizes=(1, 2, 3, 4, 5, 7) if more == "a device in a node" else (1, 2, 4)), BOUNDS)
    def law(fleet: Fleet, max_staleness: int) -> None:
        before = replace(fleet, budget_per_hour=TIGHT) if more in ("lower prices", "a budget") else fleet
        assert rate(*MORE[more](fleet, max_staleness)) >= rate(before, max_staleness) * (1 - GAPS)

    law()
