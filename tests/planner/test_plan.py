"""Plans from end to end: every device placed once, re-costed on real links, fed back, and simulated."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from rollover.devices.costs.records import TrainingPart, TrainingPlan
from rollover.devices.model_shape import parse
from rollover.devices.records import Link
from rollover.planner.job import alternatives, check
from rollover.planner.placement import Pipeline, Placement, Stage, weight_ways
from rollover.planner.plan import Plan, step_tokens
from rollover.planner.problem import PlanSpec
from rollover.planner.report import numbers, render_page, roles, sentences
from rollover.planner.search import make_plan
from rollover.planner.topology import Topology
from rollover.workload.source import read_lengths
from tests.planner.kit import QWEN_7B as QWEN_7B
from tests.planner.kit import fleet, preset, training_part

MODEL = parse(QWEN_7B, name="qwen-7b")
FLEET = fleet(400, ("h800-sxm", 8, 1), ("h20", 8, 2))


SPEC = PlanSpec(model=MODEL, workload=preset("math-16k", num_groups=64), max_staleness=4)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(FLEET, SPEC)


def test_every_device_of_the_solution_stands_in_one_place(plan: Plan) -> None:
    taken = Counter(
        (stage.node, device)
        for pipeline in (*plan.placement.training, *plan.placement.replicas)
        for stage in pipeline.stages
        for device in stage.devices
    )
    assert set(taken.values()) == {1}
    by_type = Counter(plan.fleet.nodes[node].device.name for node, _ in taken)
    assert dict(by_type) == plan.used
    assert all(device < plan.fleet.nodes[node].num_devices for node, device in taken)


def test_shapes_are_those_of_the_solution(plan: Plan) -> None:
    for member, part in enumerate(plan.solution.plan.parts):
        pipelines = [p for p in plan.placement.training if p.member == member]
        assert len(pipelines) == part.dp
        assert all(len(p.stages) == part.pp and len(p.stages[0].devices) == part.tp for p in pipelines)
    for c, kind in enumerate(plan.problem.replica_kinds):
        mine = [r for r in plan.placement.replicas if r.member == c]
        assert len(mine) == plan.solution.replicas[c]
        assert all(len(r.stages) == kind.pp and len(s.devices) == kind.tp for r in mine for s in r.stages)


def test_uniform_links_settle_in_one_round_at_the_optimisers_own_rate(plan: Plan) -> None:
    ((assumed, reached),) = plan.rounds
    assert reached == pytest.approx(assumed, rel=1e-6)


def test_a_plan_whose_simulation_misses_the_target_says_so(plan: Plan) -> None:
    rate = plan.solution.steps_per_s
    for reached, said in ((0.92 * rate, "misses the target by 8.0%"), (1.01 * rate, "")):
        aimed = replace(plan, problem=replace(plan.problem, target_steps_per_s=rate), simulated_steps_per_s=reached)
        assert (said in render_page(aimed)) and ("misses the target" in render_page(aimed)) == bool(said)


def test_narrow_links_are_found_by_the_placement_and_fed_back() -> None:
    """Between the training nodes there is a hundredth of what each node's network promises."""
    made = make_plan(fleet(400, ("h800-sxm", 4, 2), ("h20", 8, 3), links=[("n0-0", "n0-1", 4)]), SPEC)
    assumed, reached = made.rounds[0]
    assert len(made.rounds) > 1
    assert reached < 0.98 * assumed
    assert made.solution.steps_per_s == max(reached for _, reached in made.rounds) > 1.02 * reached


def test_training_keeps_to_the_nodes_with_wide_links() -> None:
    links = [("n0-0", f"n0-{other}", 100) for other in (1, 2, 3)]
    made = make_plan(fleet(400, ("h800-sxm", 4, 4), ("h20", 8, 3), links=links), SPEC)
    assert made.placement.training_nodes == (1, 2, 3)


def test_weights_take_the_widest_way(plan: Plan) -> None:
    """From a source over a relay, rather than directly over a narrower link."""
    topology = Topology.of(plan.fleet)
    widths = topology.widths.copy()
    widths[0, 2] = widths[2, 0] = 1e9
    ways = replace(topology, widths=widths).broadcast([0], [1, 2])
    assert ways[2] is not None
    assert ways[2].bytes_per_s == pytest.approx(widths[0, 1])


def test_a_node_that_trains_a_piece_of_the_weights_gets_the_rest() -> None:
    """Nodes 1 and 2 train; node 1 rolls out too."""
    topology = Topology.of(FLEET)
    copies = training_part(device="h20", dp=2)
    shards, stages = replace(copies, sharded=True), replace(copies, dp=1, pp=2)

    def way(trained: TrainingPart, *homes: tuple[int, ...]) -> Link | None:
        training = tuple(Pipeline(member=0, stages=tuple(Stage(node=n, devices=(0,)) for n in h)) for h in homes)
        plan = TrainingPlan(parts=(trained,), step_s=1.0, sync_s=0.0)
        return weight_ways(topology, plan, Placement(training=training, replicas=()), [1])[1]

    assert way(copies, (1,), (2,)) is None and way(shards, (1,), (1,)) is None
    between = topology.link(1, 2)
    assert way(shards, (1,), (2,)) == way(stages, (1, 2)) == way(copies, (2,), (1, 2)) == between


@pytest.mark.parametrize("part", [0.5, 0.998])
def test_the_cheapest_plan_reaches_its_target_for_less(plan: Plan, part: float) -> None:
    target = part * plan.solution.steps_per_s  # the listed batch caps reach 0.994
    cheap = make_plan(FLEET, replace(SPEC, target_steps_per_s=target))
    assert cheap.solution.steps_per_s >= target * (1 - 1e-6)
    assert cheap.solution.cost_per_hour is not None
    assert plan.solution.cost_per_hour is not None
    assert cheap.solution.cost_per_hour <= plan.solution.cost_per_hour * (1 if part > 0.9 else 0.6)


@pytest.mark.parametrize("name", ["math-16k", "light-8k"])
def test_the_simulation_agrees_with_the_formula_within_a_tenth(name: str) -> None:
    made = make_plan(FLEET, replace(SPEC, workload=preset(name, num_groups=64)))
    measured = check(made, read_lengths(name).workload(0), warmup=10, steps=20)
    assert measured.steps_per_s == pytest.approx(made.solution.steps_per_s, rel=0.10)
    assert measured.tokens_per_s == pytest.approx(measured.steps_per_s * step_tokens(made.workload), rel=0.03)
    assert measured.lag.max <= 4


def test_a_disagreeing_simulation_is_what_the_plan_reports(plan: Plan) -> None:
    doubted = replace(plan, simulated_steps_per_s=0.5 * plan.solution.steps_per_s)
    assert doubted.tokens_per_s == pytest.approx(0.5 * plan.tokens_per_s)
    assert doubted.cost_per_million_tokens == pytest.approx(2 * (plan.cost_per_million_tokens or 0.0))
    assert sentences(doubted)[1].startswith("The simulation disagrees with the formula: it reaches 50% of")


def test_shares_and_words_add_up(plan: Plan) -> None:
    rows = [*roles(plan)]
    for role in ("train", "rollout"):
        shares = [float(row[4].rstrip("%")) for row in rows if row[0] == role]
        assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))
    assert all(0 < float(row[5].rstrip("%")) <= 100 for row in rows)
    assert sum(int(row[1].split(" × ")[0]) for row in rows) == sum(plan.used.values())
    said = " ".join(sentences(plan))
    assert "Not verified for NVIDIA H20 96GB" in said
    assert "Efficiencies: defaults" in said
    assert "Proved: no choice of listed shapes and batch caps" in said
    assert "training step" not in " ".join([said, *(number[0] for number in numbers(plan))]).lower()


def test_the_page_is_whole_and_escapes_names(plan: Plan) -> None:
    named = replace(plan, fleet=replace(plan.fleet, name="<script>alert(1)</script>"))
    page = render_page(named)
    assert "<script>alert(1)" not in page
    assert page.count('<div class="node">') == len(plan.fleet.nodes)
    assert [page.count(f'title="{name}, device') for name in ("n0", "n1-0", "n1-1")] == [8, 8, 8]
    assert "https://" not in page.partition("<script>")[0].replace("https://arxiv", "")


SMALL = replace(SPEC, workload=preset("light-8k", num_groups=8), max_staleness=2)


def test_alternatives_spend_the_same_money() -> None:
    made = make_plan(fleet(0.1, ("h800-sxm", 2, 1), ("h20", 3, 1)), SMALL)
    money, found = made.solution.cost_per_hour, alternatives(made)
    assert money is not None and found
    for alternative in found:
        (device,) = alternative.devices
        assert alternative.name == f"{device} alone, for the same money"
        assert alternative.cost_per_hour is not None and alternative.cost_per_hour <= money * (1 + 1e-9)


def test_a_fleet_of_one_type_is_its_own_alternative() -> None:
    """A slow network, of which a plan uses what pays."""
    made = make_plan(fleet(0.1, ("h20", 3, 1), ("h20", 1, 1)), SMALL)
    (found,) = alternatives(made)
    assert found.devices == {"h20": sum(made.used.values())}
    assert found.steps_per_s == pytest.approx(made.solution.steps_per_s, rel=0.01)
