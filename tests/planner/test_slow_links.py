"""Links that are too slow for weights on each step: the rule and the times, with numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.devices.records import Link
from rollover.planner.problem import PlanSpec
from rollover.planner.records import Fleet, Node
from rollover.planner.search import make_plan
from rollover.planner.slow_links import WeightWay, least_kappa, overlaps, slow_links, way_of_weights, way_to_idle
from rollover.planner.summary import sentences
from tests.planner.kit import MODEL, device, workload


def test_the_times_of_full_weights_and_of_a_delta() -> None:
    """8 GB over 100 Mbit/s (12.5 MB/s): 640 s; over 1 Gbit/s: 64 s. A delta of 3%: 19.2 s and 1.92 s."""
    slow = WeightWay.over(Link(bytes_per_s=12.5e6, latency_s=0.0), 8e9, 1.0)
    fast = WeightWay.over(Link(bytes_per_s=125e6, latency_s=0.0), 8e9, 1.0)
    assert (slow.full_s, slow.delta_s) == pytest.approx((640.0, 19.2))
    assert (fast.full_s, fast.delta_s) == pytest.approx((64.0, 1.92))
    half = WeightWay.over(Link(bytes_per_s=125e6, latency_s=0.5), 8e9, 0.5)
    assert half.full_s == pytest.approx(128.5), "half of the bandwidth is reached, and half a second is latency"


def test_a_tenth_of_a_step_makes_a_link_slow() -> None:
    way = WeightWay.over(Link(bytes_per_s=125e6, latency_s=0.0), 8e9, 1.0)
    assert way.is_slow(639.0) and not way.is_slow(641.0)


def test_the_overlap_condition_by_hand() -> None:
    """12 samples/s, batches of 1,000, steps of 100 s, a broadcast of 30 s: one step leaves 12 * 70 = 840 samples, too
    few for 1,000; two leave 12 * 170 = 2,040, enough for 2,000."""
    assert not overlaps(12.0, 1, 100.0, 30.0, 1000)
    assert overlaps(12.0, 2, 100.0, 30.0, 1000)
    assert least_kappa(12.0, 100.0, 30.0, 1000) == 2
    assert least_kappa(12.0, 100.0, 0.5, 1000) == 1
    assert least_kappa(10.0, 100.0, 0.0, 1000) is None, "decoding alone takes the whole step"


@given(
    rate=st.floats(0.1, 1e3), step_s=st.floats(1.0, 1e4), broadcast_s=st.floats(0.0, 1e4), batch=st.integers(1, 10_000)
)
def test_the_least_kappa_is_the_least(rate: float, step_s: float, broadcast_s: float, batch: int) -> None:
    kappa = least_kappa(rate, step_s, broadcast_s, batch)
    if kappa is None:
        assert not overlaps(rate, 1000, step_s, max(broadcast_s, 1e-3), batch)
    elif kappa < 1e6:  # beyond, rounding decides
        assert overlaps(rate, kappa + 1, step_s, broadcast_s, batch)
        assert kappa == 1 or not overlaps(rate, kappa - 1, step_s, broadcast_s, batch)


def fleet(gbit_s: float, *, nodes: int = 2) -> Fleet:
    network = Link(bytes_per_s=gbit_s * 1e9 / 8, latency_s=0.0)
    made = tuple(Node(name=f"n{i}", device=device("a", network=network), num_devices=1) for i in range(nodes))
    return Fleet(name="f", nodes=made, links=(), currency="USD", budget_per_hour=None)


def spec() -> PlanSpec:
    return PlanSpec(model=MODEL, workload=workload(), max_staleness=4)


def test_a_plan_over_a_slow_link_says_that_a_swarm_is_the_answer() -> None:
    """2 GB over 1 Gbit/s are 16 s, and 0.48 s as a delta; a step of this model takes a few seconds."""
    made = make_plan(fleet(1.0), spec())
    way = way_of_weights(made) or (way_to_idle(made) or ((), None))[1]
    assert way is not None and (way.full_s, way.delta_s) == pytest.approx((16.0, 0.48))
    (said,) = slow_links(made)
    assert "2 GB of weights take 16 s over 1 Gbit/s" in said
    assert 'engine.kind = "swarm"' in said and "0.48 s" in said
    assert said in sentences(made)


def test_a_plan_over_a_fast_link_says_nothing_of_it() -> None:
    made = make_plan(fleet(400.0), spec())
    assert [*slow_links(made)] == []


def test_how_often_to_publish_follows_from_the_plan() -> None:
    """With a trainer as slow as the replicas are fast, the numbers of the sentence are those of the rule."""
    made = make_plan(fleet(1.0), spec())
    slow = replace(made.solution.plan, step_s=100.0)
    made = replace(made, solution=replace(made.solution, plan=slow))
    assert way_of_weights(made) is not None, "one of the two nodes trains, the other rolls out"
    (said,) = slow_links(made)
    assert "The trainer never waits when weights are published on each step (max_staleness 2 or more)" in said
