"""Infeasible problems name what would lift them, and that does lift them; shadow prices are real differences."""

from __future__ import annotations

import re
from dataclasses import replace

from rollover.planner.explain import why_infeasible
from rollover.planner.optimum import solve
from rollover.planner.problem import stock_problem
from rollover.planner.records import Problem
from tests.planner.kit import MODEL, device, workload

A, B = device("a"), device("b", flops=100e12, price_per_hour=1.0)


def problem(**changes: object) -> Problem:
    built = stock_problem({A: 4, B: 4}, MODEL, workload(), max_staleness=2)
    return replace(built, **changes)  # type: ignore[arg-type]


def step_tokens(here: Problem) -> float:
    return here.workload.batch_size * here.workload.response_tokens


def fastest(here: Problem) -> float:
    solution = solve(here, simplify=False)
    assert solution is not None
    return solution.steps_per_s


def test_a_budget_too_small_is_named_with_one_that_would_do() -> None:
    target = 0.8 * fastest(problem())
    short = problem(target_steps_per_s=target, budget_per_hour=2.0)
    assert solve(short) is None
    text = why_infeasible(short)
    found = re.search(r"budget: ([\d.]+) per hour would be enough, 2 is given", text)
    assert found, text
    assert solve(replace(short, budget_per_hour=float(found[1]) + 0.01)) is not None
    assert solve(replace(short, budget_per_hour=float(found[1]) * 0.99)) is None
    rate = target * step_tokens(short)
    assert text.startswith(f"{rate:,.0f} tokens/s cannot be reached") or "at any rate" in text


def test_a_stock_too_small_is_named_with_the_devices_that_would_do() -> None:
    built = problem()
    fewer = tuple(replace(s, count=1) for s in built.supplies)
    short = replace(built, supplies=fewer, target_steps_per_s=0.95 * fastest(built))
    assert solve(short) is None
    text = why_infeasible(short)
    more = {name: int(n) for n, name in re.findall(r"(\d+) more (\w)", text)}
    assert more, text
    enough = tuple(replace(s, count=s.count + more.get(s.device, 0)) for s in fewer)
    assert solve(replace(short, supplies=enough)) is not None


def test_a_fleet_that_only_trains_is_told_how_many_more_would_roll_out() -> None:
    one = replace(problem(), supplies=tuple(replace(s, count=1) for s in problem().supplies[:1]))
    one = replace(one, plans=tuple(p for p in one.plans if p.count("a") == p.num_devices == 1))
    one = replace(one, replica_kinds=tuple(c for c in one.replica_kinds if c.device == "a" and c.num_devices == 1))
    assert solve(one) is None
    assert why_infeasible(one) == "no plan satisfies all limits:\n  stock: 1 more a would be enough"


def test_a_bound_too_tight_is_named_with_one_that_would_do() -> None:
    slow = replace(problem(), workload=workload(reward_s=60.0))
    slow = stock_problem({A: 4, B: 4}, MODEL, slow.workload, max_staleness=0)
    target = 0.5 * fastest(replace(slow, max_staleness=50))
    short = replace(slow, target_steps_per_s=target)
    assert solve(short) is None
    found = re.search(r"staleness: max_staleness (\d+) would be enough, 0 is given", why_infeasible(short))
    assert found
    assert solve(replace(short, max_staleness=int(found[1]))) is not None
    assert solve(replace(short, max_staleness=int(found[1]) - 1)) is None


def test_a_tail_that_no_plan_keeps_is_named() -> None:
    short = problem(max_staleness=0, tail="hard")
    assert solve(short) is None
    assert "tail: without 'hard', a plan keeps the bound on average" in why_infeasible(short)
    assert solve(replace(short, tail="none")) is not None


def test_what_no_single_limit_forbids_is_said_too() -> None:
    built = problem()
    quickest = min(plan.cycle_s for plan in built.plans)
    text = why_infeasible(replace(built, target_steps_per_s=2 / quickest))
    assert "the fastest trainer that fits this fleet takes" in text
    assert "cannot be reached; the fastest plan reaches" in text
