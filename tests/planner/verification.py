"""A solution checked against its problem apart from the solver: whole numbers exactly, rates to rounding.

The rows are written down a second time, from the records and not from the programme's matrices; devices, prices and the
budget are compared as fractions.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from rollover.planner.records import Problem, Solution

ROUNDING = 1e-6


def violations(problem: Problem, solution: Solution) -> list[str]:
    """List every limit that the solution breaks; empty for a sound one."""
    return [
        *_counts(problem, solution),
        *_production(problem, solution),
        *_replicas(problem, solution),
        *_staleness(problem, solution),
    ]


def _counts(problem: Problem, solution: Solution) -> Iterator[str]:
    """Check stock, roles, budget and the trainer."""
    if solution.plan not in problem.plans:
        yield "the training plan is none of the problem's"
    if any(y < 0 for y in solution.replicas):
        yield "a number of replicas is negative"
    cost = Fraction(0)
    for supply in problem.supplies:
        rolling = sum(
            y * c.num_devices
            for y, c in zip(solution.replicas, problem.replica_kinds, strict=True)
            if c.device == supply.device
        )
        training = solution.plan.count(supply.device)
        if rolling + training > supply.count:
            yield f"{rolling + training} devices of {supply.device}, {supply.count} allowed"
        if supply.price_per_hour is not None:
            cost += (rolling + training) * Fraction(supply.price_per_hour)
    if problem.budget_per_hour is not None and cost > Fraction(problem.budget_per_hour) * Fraction(1 + ROUNDING):
        yield f"costs {float(cost)} an hour, budget {problem.budget_per_hour}"


def _production(problem: Problem, solution: Solution) -> Iterator[str]:
    """Check that the trainer keeps the rate and that all samples are produced at it."""
    rate = solution.steps_per_s
    if rate * solution.plan.cycle_s > 1 + ROUNDING:
        yield f"the trainer needs {solution.plan.cycle_s} s for a step, {1 / rate} s are planned"
    made, needed = sum(solution.rates), problem.workload.batch_size * rate
    if made < needed * (1 - ROUNDING):
        yield f"{made} samples/s made, {needed} needed"


def _replicas(problem: Problem, solution: Solution) -> Iterator[str]:
    """Check time and KV cache of each kind's replicas."""
    workload = problem.workload
    away_s = workload.reward_s + workload.held_s
    for kind, y, x in zip(problem.replica_kinds, solution.replicas, solution.rates, strict=True):
        name = f"{kind.device} tp {kind.tp} pp {kind.pp} batch {kind.batch_cap}"
        left = 1 - solution.steps_per_s * kind.update_s
        if not x:
            continue
        if left <= 0:
            yield f"{name}: weight updates leave no time"
            continue
        busy, running_s = x / (kind.rate * left), kind.latency_s - away_s
        longer = (running_s / left + workload.held_s) / (running_s + workload.held_s)
        held = x * kind.kv_byte_s * longer
        if busy > y + ROUNDING * max(1, y):
            yield f"{name}: {busy} replicas' time used, {y} replicas"
        if held > kind.kv_bytes * (y + ROUNDING * max(1, y)):
            yield f"{name}: {held} bytes of cache held, room for {kind.kv_bytes * y}"


def _staleness(problem: Problem, solution: Solution) -> Iterator[str]:
    """Check what is admitted and not consumed, in batches (Little's law)."""
    workload, rate = problem.workload, solution.steps_per_s
    away_s = workload.reward_s + workload.held_s
    in_flight = rate * solution.plan.cycle_s
    for kind, x in zip(problem.replica_kinds, solution.rates, strict=True):
        if x:
            latency_s = kind.group_latency_s if problem.max_staleness else kind.batch_latency_s
            in_flight += x / workload.batch_size * ((latency_s - away_s) / (1 - rate * kind.update_s) + away_s)
    if in_flight > (problem.max_staleness + 1) * (1 + ROUNDING):
        yield f"{in_flight} batches admitted and not consumed, {problem.max_staleness + 1} allowed"
