"""The audit finds every kind of broken limit."""

from __future__ import annotations

from collections.abc import Callable
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


BROKEN: dict[str, Callable[[Solution], tuple[Problem, Solution]]] = {
    "devices of a, 4 allowed": lambda found: (PROBLEM, replace(found, replicas=tuple(y + 1 for y in found.replicas))),
    "costs 8.0 an hour, budget 7.99": lambda found: (replace(PROBLEM, budget_per_hour=7.99), found),
    "samples/s made": lambda found: (PROBLEM, replace(found, steps_per_s=found.steps_per_s * 1.01)),
    "the trainer needs": lambda found: (PROBLEM, replace(found, steps_per_s=2 / found.plan.cycle_s)),
    "replicas' time used, 0 replicas": lambda found: (PROBLEM, replace(found, replicas=(0,) * len(found.replicas))),
    "batches admitted and not consumed, 2 allowed": lambda found: (
        replace(PROBLEM, replica_kinds=tuple(replace(c, group_latency_s=1e3) for c in PROBLEM.replica_kinds)),
        found,
    ),
}


@pytest.mark.parametrize("said", BROKEN)
def test_a_broken_limit_is_found(said: str, solution: Solution) -> None:
    assert said in "\n".join(verification.violations(*BROKEN[said](solution)))
