"""Links that are too slow for weights on each step: the rule and the times, with numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollover.devices.records import Link
from rollover.planner.problem import PlanSpec
from rollover.planner.records import Fleet, Node
from rollover.planner.report import report
from rollover.planner.search import make_plan
from rollover.planner.slow_links import least_kappa, slow_links
from tests.planner.kit import MODEL, device, workload


@pytest.mark.parametrize(
    ("samples_per_s", "broadcast_s", "kappa"),
    [
        (12.0, 30.0, 2),  # 12 * (100 - 30) = 840 samples are too few for 1,000; 12 * (200 - 30) = 2,040 do for 2,000
        (12.0, 0.5, 1),
        (20.0, 50.0, 1),  # just enough
        (20.0, 51.0, 2),
        (10.0, 0.0, None),  # decoding alone takes the whole step
    ],
)
def test_how_often_weights_can_be_published(samples_per_s: float, broadcast_s: float, kappa: int | None) -> None:
    assert least_kappa(samples_per_s, 100.0, broadcast_s, 1000) == kappa


def fleet(gbit_s: float, *, nodes: int = 2) -> Fleet:
    network = Link(bytes_per_s=gbit_s * 1e9 / 8, latency_s=0.0)
    made = tuple(Node(name=f"n{i}", device=device("a", network=network), num_devices=1) for i in range(nodes))
    return Fleet(name="f", nodes=made, links=(), currency="USD", budget_per_hour=None)


def spec() -> PlanSpec:
    return PlanSpec(model=MODEL, workload=workload(), max_staleness=4)


def test_a_plan_over_a_slow_link_says_that_a_swarm_is_the_answer() -> None:
    """2 GB over 1 Gbit/s are 16 s, and 0.48 s as a delta; a step of this model takes a few seconds."""
    made = make_plan(fleet(1.0), spec())
    (said,) = slow_links(made)
    assert "2 GB of weights take 16 s over 1 Gbit/s" in said
    assert 'engine.kind = "swarm"' in said and "0.48 s" in said
    assert said in report(made).sentences


def test_a_tenth_of_a_step_makes_a_link_slow() -> None:
    """2 GB over 1 Gbit/s are 16 s: a tenth of 160 s."""
    made = make_plan(fleet(1.0), spec())

    def said(step_s: float) -> list[str]:
        training = replace(made.solution.plan, step_s=step_s)
        return [*slow_links(replace(made, solution=replace(made.solution, plan=training)))]

    assert said(159.0) and not said(161.0)
    assert not [*slow_links(make_plan(fleet(400.0), spec()))]


def test_how_often_to_publish_follows_from_the_plan() -> None:
    """With a trainer as slow as the replicas are fast, the numbers of the sentence are those of the rule."""
    made = make_plan(fleet(1.0), spec())
    slow = replace(made.solution.plan, step_s=100.0)
    made = replace(made, solution=replace(made.solution, plan=slow))
    (said,) = slow_links(made)
    assert "The trainer never waits when weights are published on each step (max_staleness 2 or more)" in said
