"""What a plan says against itself: what this version cannot train, and what holds it up."""

from __future__ import annotations

from dataclasses import replace
from html import escape

import pytest
from pydantic import TypeAdapter

from rollover.devices.model_shape import parse
from rollover.planner.plan import Plan
from rollover.planner.problem import PlanSpec
from rollover.planner.report import render_page, sentences
from rollover.planner.search import make_plan
from tests.planner.kit import QWEN_1B, fleet, preset

SPEC = PlanSpec(model=parse(QWEN_1B, name="qwen-1.5b"), workload=preset("light-8k", num_groups=32), max_staleness=4)


@pytest.fixture(scope="module")
def plan() -> Plan:
    made = make_plan(fleet(100, ("h100-sxm", 4, 2)), replace(SPEC, launchable="vllm"))
    assert made.solution.plan.num_devices > 1
    return made


def pipelined(plan: Plan) -> Plan:
    """The same plan, but with a trainer in pipeline stages."""
    (part,) = plan.solution.plan.parts
    training = replace(plan.solution.plan, parts=(replace(part, dp=1, pp=part.dp),))
    return replace(plan, solution=replace(plan.solution, plan=training))


def test_a_plan_that_cannot_be_launched_says_why_first(plan: Plan) -> None:
    said = sentences(pipelined(plan))[0]
    assert said.startswith("rollover launch cannot run this plan: on h100-sxm, the trainer supports only data")
    assert said.endswith("--for-launch plans what it can run.") and escape(said) in render_page(pipelined(plan))


def test_a_plan_made_for_launch_can_be_launched(plan: Plan) -> None:
    (part,) = plan.solution.plan.parts
    assert (part.tp, part.pp) == (1, 1) and part.sharded and part.dp > 1
    assert plan.obstacles == ()
    assert TypeAdapter(Plan).validate_json(plan.to_json()) == plan


def test_each_part_that_cannot_be_launched_is_named(plan: Plan) -> None:
    (part,) = plan.solution.plan.parts
    other = replace(part, device="l4", dp=2, tp=2, pp=1)
    training = replace(plan.solution.plan, parts=(part, other))
    first, *rest = plan.placement.replicas
    apart = replace(first, stages=(replace(first.stages[0], node=0), replace(first.stages[0], node=1)))
    made = replace(
        plan, solution=replace(plan.solution, plan=training), placement=replace(plan.placement, replicas=(apart, *rest))
    )
    assert plan.obstacles == ()
    assert made.obstacles == (
        "it trains on 2 types of device (h100-sxm and l4), but the trainer supports only one",
        "on l4, the trainer supports only data parallelism, not tensor parallel 2",
        "1 of its replicas span several nodes, but a server runs on one",
    )


def test_nodes_beyond_a_slow_link_are_idle_and_what_they_cost_is_said() -> None:
    alone, both = (make_plan(fleet(0.1, ("h100-sxm", 4, count)), SPEC) for count in (1, 2))
    assert both.solution.steps_per_s == pytest.approx(alone.solution.steps_per_s)
    assert both.idle == {"h100-sxm": 4}
    assert {node for pipeline in both.placement.training for node in pipeline.nodes} <= {0}
    assert not [binding for binding in both.solution.bindings if binding.row == "stock"], "half of it is free"
    limited = replace(both, problem=replace(both.problem, budget_per_hour=50.0))
    for plan, than in ((both, "better"), (limited, "better within the budget")):
        idle = (
            f"Idle: 4 × h100-sxm; no plan that uses them was found to be {than}. Not renting them saves 10.76 USD per"
        )
        assert f"{idle} hour." in sentences(plan)


def test_a_trainer_that_is_held_up_by_weight_updates_is_not_called_busy() -> None:
    """Three nodes of one device, between which the weights take 72 s while a step takes 7 s."""
    spec = replace(SPEC, workload=preset("light-8k", num_groups=32, group_size=4), max_staleness=8)
    slow = make_plan(fleet(0.5, ("h100-sxm", 1, 3)), spec)
    rows = {binding.row for binding in slow.solution.bindings}
    assert {"trainer", "replicas"} <= rows

    def said(step_s: float, sync_s: float, *, all_busy: bool = True) -> str:
        training = replace(slow.solution.plan, step_s=step_s, sync_s=sync_s)
        bindings = tuple(b for b in slow.solution.bindings if all_busy or b.row != "replicas")
        made = replace(slow, solution=replace(slow.solution, plan=training, bindings=bindings))
        return next(s for s in sentences(made) if "bottleneck" in s or "neither waits" in s)

    own = slow.solution.plan
    assert said(own.step_s, own.sync_s) == (
        "Weight updates are the bottleneck: the trainer trains for 9% of its time, and waits for 91% until the engines"
        " have new weights; the replicas are busy all the time, too."
    )
    assert said(6.0, 4.0, all_busy=False) == (
        "Training and weight updates together are the bottleneck: the trainer trains for 60% of its time, and waits for"
        " 40% until the engines have new weights; some replicas have time to spare."
    )
    assert said(9.0, 1.0) == "Trainer and replicas are both busy all the time: neither waits for the other."
    assert said(9.0, 1.0, all_busy=False).startswith("Training is the bottleneck: the trainer is never idle")
