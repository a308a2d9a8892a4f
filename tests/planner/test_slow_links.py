"""Links that are too slow for weights on each step: the rule and the times, with numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from rollover.devices.records import Link
from rollover.planner.problem import PlanSpec
from rollover.planner.records import Fleet, Node
from rollover.planner.report import sentences
from rollover.planner.search import make_plan
from rollover.planner.slow_links import slow_links
from tests.planner.kit import MODEL, device, workload


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
    assert said in sentences(made)


def test_a_tenth_of_a_step_makes_a_link_slow() -> None:
    """2 GB over 1 Gbit/s are 16 s: a tenth of 160 s."""
    made = make_plan(fleet(1.0), spec())

    def said(step_s: float) -> list[str]:
        training = replace(made.solution.plan, step_s=step_s)
        return [*slow_links(replace(made, solution=replace(made.solution, plan=training)))]

    assert said(159.0) and not said(161.0)
    assert not [*slow_links(make_plan(fleet(400.0), spec()))]
