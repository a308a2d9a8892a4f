"""Phase 1 against exhaustive enumeration, closed forms and the laws of an optimum."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollover.devices.costs.records import ReplicaKind, TrainingPlan
from rollover.devices.records import WorkloadSpec
from rollover.errors import PlanError
from rollover.planner.choices import replica_kinds
from rollover.planner.milp import Program, ProgramPoint
from rollover.planner.optimum import solve
from rollover.planner.problem import stock_problem
from rollover.planner.records import Problem, Supply
from tests.planner import verification
from tests.planner.kit import (
    BUCKET,
    MODEL,
    best_by_enumeration,
    choices,
    cost_of,
    device,
    problems,
    rate_of,
    replica,
    training_part,
    workload,
)

GAP = 1e-4


def rate(problem: Problem) -> float:
    solution = solve(problem, gap=GAP, simplify=False)
    return solution.steps_per_s if solution else 0.0


def close(a: float, b: float, tolerance: float = 2 * GAP) -> bool:
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-9)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_optimum_is_that_of_trying_everything(problem: Problem) -> None:
    assert close(rate(problem), best_by_enumeration(problem))


@settings(max_examples=16, deadline=None)
@given(problems(updates=True, most=2), st.sampled_from(["none", "soft", "hard"]))
def test_with_costly_weight_updates_and_a_bound_on_the_tail_too(problem: Problem, tail: str) -> None:
    bound = replace(problem, tail=tail)
    assert close(rate(bound), best_by_enumeration(bound))


def twins() -> Problem:
    """Two types alike, each with its only replica and its only trainer listed twice."""
    types = ("a", "a", "b", "b")
    return Problem(
        supplies=tuple(Supply(device=d, count=1, price_per_hour=1.0) for d in "ab"),
        replica_kinds=tuple(replica(device=d) for d in types),
        plans=tuple(TrainingPlan(parts=(training_part(device=d),), step_s=1.0, sync_s=0.0) for d in types),
        workload=WorkloadSpec(name="w", num_groups=2, group_size=2, prompt_tokens=1, buckets=(BUCKET,)),
        max_staleness=0,
    )


@settings(max_examples=6, deadline=None)
@given(problems(most=1))
@example(twins())
def test_what_rounding_misses_is_found_without_it(problem: Problem) -> None:
    def nothing(program: Program, point: ProgramPoint) -> None:
        program.limit(program.unit_row("z"), 0.5)

    with patch.object(Program, "round_caps", nothing):
        solution = solve(problem, gap=1e-2, simplify=False)
    assert close(solution.steps_per_s if solution else 0.0, best_by_enumeration(problem), 2e-2)


@settings(max_examples=20, deadline=None)
@given(problems(updates=True))
def test_what_is_found_keeps_every_limit_and_reaches_its_rate(problem: Problem) -> None:
    solution = solve(problem, gap=GAP)
    if solution is not None:
        assert verification.violations(problem, solution) == []
        assert close(rate_of(problem, solution.replicas, solution.plan), solution.steps_per_s)
        assert solution.steps_per_s <= solution.bound_steps_per_s * (1 + 1e-9)


@settings(max_examples=8, deadline=None)
@given(problems(updates=True), st.sampled_from([0.25, 3.0, 1000.0]))
def test_a_world_k_times_faster_has_k_times_the_rate(problem: Problem, k: float) -> None:
    seconds = [name for name in ReplicaKind.__slots__ if name.endswith("_s")]
    quick = replace(
        problem,
        replica_kinds=tuple(
            replace(c, rate=c.rate * k, **{name: getattr(c, name) / k for name in seconds})
            for c in problem.replica_kinds
        ),
        plans=tuple(replace(p, step_s=p.step_s / k, sync_s=p.sync_s / k) for p in problem.plans),
        workload=replace(problem.workload, held_s=problem.workload.held_s / k),
    )
    assert close(rate(quick), k * rate(problem))


@settings(max_examples=8, deadline=None)
@given(problems())
def test_prices_and_budget_in_another_currency_give_the_same_plan(problem: Problem) -> None:
    other = replace(
        problem,
        supplies=tuple(replace(s, price_per_hour=(s.price_per_hour or 0.0) * 8) for s in problem.supplies),
        budget_per_hour=None if problem.budget_per_hour is None else problem.budget_per_hour * 8,
    )
    first, second = solve(problem, gap=GAP), solve(other, gap=GAP)
    assert (first and (first.replicas, first.plan)) == (second and (second.replicas, second.plan))


@settings(max_examples=8, deadline=None)
@given(problems(updates=True), st.randoms(use_true_random=False))
def test_names_and_order_change_nothing(problem: Problem, random: object) -> None:
    def renamed(thing: Any) -> Any:
        return replace(thing, device={"a": "z", "b": "y"}[thing.device])

    order = list(range(len(problem.replica_kinds)))
    random.shuffle(order)  # type: ignore[attr-defined]
    other = replace(
        problem,
        supplies=tuple(map(renamed, reversed(problem.supplies))),
        replica_kinds=tuple(renamed(problem.replica_kinds[i]) for i in order),
        plans=tuple(replace(p, parts=tuple(map(renamed, p.parts))) for p in reversed(problem.plans)),
    )
    first, second = solve(problem, gap=GAP), solve(other, gap=GAP)
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert second.steps_per_s == first.steps_per_s
        assert second.replicas == tuple(first.replicas[i] for i in order)
        assert second.rates == tuple(first.rates[i] for i in order)


@settings(max_examples=10, deadline=None)
@given(problems())
def test_a_loose_bound_is_no_bound(problem: Problem) -> None:
    loose = [rate(replace(problem, max_staleness=bound)) for bound in (10**3, 10**6)]
    assert close(*loose)


@settings(max_examples=8, deadline=None)
@given(problems(updates=True))
def test_the_staleness_that_a_plan_needs_is_enough_and_no_more(problem: Problem) -> None:
    solution = solve(problem, gap=GAP)
    if solution is None:
        return
    needed = solution.staleness_needed
    assert needed <= problem.max_staleness
    enough = rate_of(replace(problem, max_staleness=needed), solution.replicas, solution.plan)
    assert enough >= solution.steps_per_s * (1 - 2e-3)
    if needed:
        less = rate_of(replace(problem, max_staleness=needed - 1), solution.replicas, solution.plan)
        assert less < solution.steps_per_s * (1 - 0.9e-3)


@settings(max_examples=8, deadline=None)
@given(problems(most=2), st.floats(0.3, 0.95))
def test_the_cheapest_plan_reaches_its_target_and_none_is_cheaper(problem: Problem, part: float) -> None:
    best = rate(problem)
    if not best:
        return
    target = best * part
    solution = solve(replace(problem, target_steps_per_s=target), gap=GAP)
    assert solution is not None
    assert rate_of(problem, solution.replicas, solution.plan) >= target * (1 - 1e-6)
    cost = cost_of(problem, solution.replicas, solution.plan)
    assert solution.cost_per_hour == pytest.approx(cost)
    cheaper = [c for c in choices(problem) if cost_of(problem, *c) < cost * (1 - 2 * GAP)]
    assert all(rate_of(problem, *choice) < target * (1 + 1e-6) for choice in cheaper)


@pytest.mark.parametrize("quick", ["a", "b"])
def test_of_equal_plans_the_one_with_the_fewest_replica_kinds_is_chosen(quick: str) -> None:
    """Two replicas on the two ``b``, or one on each type while the other ``b`` trains: the same rate, the same cost."""
    few = twins()
    plans = {plan.parts[0].device: plan for plan in few.plans}
    problem = replace(
        few,
        supplies=(few.supplies[0], replace(few.supplies[1], count=2)),
        replica_kinds=tuple({kind.device: kind for kind in few.replica_kinds}.values()),
        plans=tuple(replace(plan, step_s=0.5 if name == quick else 0.6) for name, plan in plans.items()),
        max_staleness=10,
    )
    solution = solve(problem, gap=GAP)
    assert solution is not None
    assert solution.plan.parts[0].device == "a" and solution.replicas == (0, 2)
    assert close(solution.steps_per_s, best_by_enumeration(problem))


def test_the_least_cost_needs_every_price() -> None:
    built = stock_problem({device(price_per_hour=None): 4}, MODEL, workload(), max_staleness=1)
    with pytest.raises(PlanError, match=r"needs a price: write price_per_hour for a$"):
        solve(replace(built, target_steps_per_s=1e-3))


def test_half_a_fleet_under_another_name_is_worth_no_more() -> None:
    whole = stock_problem({device("a"): 8}, MODEL, workload(), max_staleness=2)
    halves = stock_problem({device("a"): 4, device("b"): 4}, MODEL, workload(), max_staleness=2)
    mixed = [part for plan in halves.plans for part in plan.parts if len(plan.parts) > 1]
    assert mixed, "gradients may meet across the halves"
    assert rate(halves) <= rate(whole) * (1 + 2 * GAP)


def test_a_choice_that_is_dominated_is_never_missed() -> None:
    spec = workload()
    built = stock_problem({device(): 4}, MODEL, spec, max_staleness=1)
    every = tuple(replica_kinds(device(), (4,), MODEL, spec))
    assert len(every) > len(built.replica_kinds)
    assert close(rate(built), rate(replace(built, replica_kinds=every)))


def test_a_budget_that_pays_for_a_trainer_and_no_replica_has_no_plan() -> None:
    """However slow: the solver takes a millionth of a replica for none."""
    built = stock_problem({device(): 4}, MODEL, workload(), max_staleness=4)
    assert solve(replace(built, budget_per_hour=3.0)) is None
    assert solve(replace(built, budget_per_hour=4.0)) is not None
