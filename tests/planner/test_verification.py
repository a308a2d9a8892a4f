"""The audit finds every kind of broken limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollover.planner.optimum import solve
from rollover.planner.problem import stock_problem
from rollover.planner.records import Problem, Solution
from tests.planner import verification
from tests.planner.kit import MODEL, device, workload

PROBLEM = replace(stock_problem({device(): 4}, MODEL, workload(), max_staleness=1), budget_per_hour=8.0)


@pytest.fixture(scope="module")
def solution() -> Solution:
    found = solve(PROBLEM)
    assert found is not None
    assert verification.violations(PROBLEM, found) == []
    return found


def broken(problem: Problem, solution: Solution) -> str:
    return "\n".join(verification.violations(problem, solution))


def test_a_device_too_many_and_a_budget_passed_are_found(solution: Solution) -> None:
    more = tuple(y + 1 if i in solution.active[:1] else y for i, y in enumerate(solution.replicas))
    assert "devices of a, 4 allowed" in broken(PROBLEM, replace(solution, replicas=more))
    assert "costs 8.0 an hour, budget 7.99" in broken(replace(PROBLEM, budget_per_hour=7.99), solution)


def test_a_rate_that_is_not_reached_is_found(solution: Solution) -> None:
    faster = replace(solution, steps_per_s=solution.steps_per_s * 1.01)
    assert "samples/s made" in broken(PROBLEM, faster)
    assert "the trainer needs" in broken(PROBLEM, replace(solution, steps_per_s=2 / solution.plan.cycle_s))


def test_replicas_that_are_not_there_are_found(solution: Solution) -> None:
    none = replace(solution, replicas=tuple(0 for _ in solution.replicas))
    assert "replicas' time used, 0 replicas" in broken(PROBLEM, none)


def test_a_staleness_bound_passed_is_found(solution: Solution) -> None:
    slow = tuple(replace(c, group_latency_s=100 * c.group_latency_s) for c in PROBLEM.replica_kinds)
    assert "batches admitted and not consumed, 2 allowed" in broken(replace(PROBLEM, replica_kinds=slow), solution)
