"""A solution checked against its problem apart from the solver: whole numbers exactly, rates to rounding.

The rows are written down a second time, from the records and not from the programme's matrices; devices, prices and the
budget are compared as fractions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from rollover.devices.costs.records import TrainingPlan
from rollover.planner.records import Problem, Solution

ROUNDING = 1e-6


def violations(problem: Problem, solution: Solution) -> list[str]:
    """List every limit that the solution breaks; empty for a sound one."""
    return [*_counts(problem, solution), *_rates(problem, solution)]


def devices_used(problem: Problem, replicas: Sequence[int], plan: TrainingPlan) -> dict[str, int]:
    """Return the number of devices of each type that replicas and trainer take."""
    used = {supply.device: plan.count(supply.device) for supply in problem.supplies}
    for number, kind in zip(replicas, problem.replica_kinds, strict=True):
        used[kind.device] += number * kind.num_devices
    return used


def _counts(problem: Problem, solution: Solution) -> Iterator[str]:
    """Check the trainer, numbers of replicas, stock and budget."""
    if solution.plan not in problem.plans:
        yield "the training plan is none of the problem's"
    if any(y < 0 for y in solution.replicas):
        yield "a number of replicas is negative"
    used, cost = devices_used(problem, solution.replicas, solution.plan), Fraction(0)
    for supply in problem.supplies:
        if used[supply.device] > supply.count:
            yield f"{used[supply.device]} devices of {supply.device}, {supply.count} allowed"
        cost += used[supply.device] * Fraction(supply.price_per_hour or 0)
    if problem.budget_per_hour is not None and cost > Fraction(problem.budget_per_hour) * Fraction(1 + ROUNDING):
        yield f"costs {float(cost)} an hour, budget {problem.budget_per_hour}"


def _rates(problem: Problem, solution: Solution) -> Iterator[str]:
    """Check the trainer's time, that all samples are produced, each kind's time and KV cache, and what is admitted and
    not consumed, in batches (Little's law)."""
    workload, rate, cycle_s = problem.workload, solution.steps_per_s, solution.plan.cycle_s
    if rate * cycle_s > 1 + ROUNDING:
        yield f"the trainer needs {cycle_s} s for a step, {1 / rate} s are planned"
    made, needed = sum(solution.rates), workload.batch_size * rate
    if made < needed * (1 - ROUNDING):
        yield f"{made} samples/s made, {needed} needed"
    away_s, in_flight = workload.reward_s + workload.held_s, rate * cycle_s
    for kind, y, x in zip(problem.replica_kinds, solution.replicas, solution.rates, strict=True):
        if not x:
            continue
        name = f"{kind.device} tp {kind.tp} pp {kind.pp} batch {kind.batch_cap}"
        left = 1 - rate * kind.update_s
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
        latency_s = kind.group_latency_s if problem.max_staleness else kind.batch_latency_s
        in_flight += x / workload.batch_size * ((latency_s - away_s) / left + away_s)
    if in_flight > (problem.max_staleness + 1) * (1 + ROUNDING):
        yield f"{in_flight} batches admitted and not consumed, {problem.max_staleness + 1} allowed"
