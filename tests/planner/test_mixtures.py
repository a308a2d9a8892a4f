"""Trainers over two types: all pairs of shapes are judged, and the few that matter written down."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.devices.costs.records import TrainingPart, TrainingPlan
from rollover.devices.costs.training import TrainerCosts, trainer_costs, training_plan
from rollover.devices.records import Device, Link
from rollover.errors import PlanError
from rollover.planner.mixtures import MixtureTable, UnlistedPlans
from rollover.planner.optimum import solve
from rollover.planner.problem import stock_problem
from rollover.planner.rate_load import RateLoad
from rollover.planner.records import Problem
from tests.planner import verification
from tests.planner.kit import MODEL, best_by_enumeration, device, workload

GAP = 1e-4


@st.composite
def fleets(draw: st.DrawFn, *, most: int = 6) -> dict[Device, int]:
    """Two types, compute and memory drawn apart, joined well or badly."""
    names = ("a", "b")
    network = Link(bytes_per_s=draw(st.sampled_from([1e9, 12e9, 50e9])), latency_s=2e-5)
    return {
        device(
            name,
            flops=draw(st.floats(50e12, 1000e12)),
            hbm_bytes_per_s=draw(st.floats(0.3e12, 4e12)),
            hbm_bytes=draw(st.sampled_from([12e9, 24e9, 80e9])),
            network=network,
            price_per_hour=draw(st.floats(0.5, 4.0)),
        ): draw(st.integers(1, most))
        for name in names
    }


def every_plan(stock: dict[Device, int]) -> list[TrainingPlan]:
    """Every shape of every type, alone and beside every shape of the other, whatever it is worth."""
    spec, found = workload(), []
    alone: dict[Device, list[TrainerCosts]] = {made: [] for made in stock}
    for made, count in stock.items():
        sizes = [1, 2, 4, 8]
        for dp, tp, pp in itertools.product(range(1, count + 1), sizes, [1, 2, 4]):
            for sharded, recompute in itertools.product((False, True), (False, True)):
                part = TrainingPart(
                    device=made.name, dp=dp, tp=tp, pp=pp, sharded=sharded, recompute=recompute, share=1.0
                )
                trainer = trainer_costs(MODEL, spec, made, part)
                if dp * tp * pp <= count and trainer.fits() and (dp > 1 or not sharded):
                    alone[made].append(trainer)
        found += [training_plan((trainer,)) for trainer in alone[made]]
    found += [training_plan(pair) for pair in itertools.product(*alone.values())]
    return [plan for plan in found if all(part.share > 0 for part in plan.parts)]


def fastest(plans: list[TrainingPlan]) -> tuple[TrainingPlan, ...]:
    """Of each number of devices."""
    best: dict[tuple[int, int], TrainingPlan] = {}
    for plan in sorted(plans, key=lambda plan: plan.cycle_s):
        best.setdefault((plan.count("a"), plan.count("b")), plan)
    return tuple(best.values())


def fewest(plans: list[TrainingPlan], names: tuple[str, str]) -> dict[tuple[int, int], float]:
    """The least cycle time of each number of devices, where no fewer do it in that time."""
    best: dict[tuple[int, int], float] = {}
    for plan in plans:
        key = (plan.count(names[0]), plan.count(names[1]))
        best[key] = min(best.get(key, np.inf), plan.cycle_s)
    return {
        (a, b): cycle_s
        for (a, b), cycle_s in best.items()
        if not any(other <= cycle_s for (x, y), other in best.items() if (x, y) != (a, b) and x <= a and y <= b)
    }


@settings(max_examples=25, deadline=None, derandomize=True)
@given(fleets())
def test_every_pair_of_shapes_that_none_of_fewer_devices_beats_is_there(stock: dict[Device, int]) -> None:
    try:
        built = stock_problem(stock, MODEL, workload(), max_staleness=2)
    except PlanError:
        return
    table = MixtureTable.of(built)
    offered = list(built.plans) + [table.plan(built, index) for index in range(len(table))]
    expected = fewest(every_plan(stock), ("a", "b"))
    assert fewest(offered, ("a", "b")) == pytest.approx(expected, rel=1e-12)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(fleets(most=4), st.integers(0, 2))
def test_the_optimum_is_over_every_trainer_and_number_of_replicas(stock: dict[Device, int], max_staleness: int) -> None:
    """Not of a list of them: of all, alone and in pairs, with one kind of replica of each type."""
    try:
        built = stock_problem(stock, MODEL, workload(), max_staleness=max_staleness)
    except PlanError:
        return
    few = tuple(max((c for c in built.replica_kinds if c.device == made.name), key=lambda c: c.rate) for made in stock)
    problem = replace(built, replica_kinds=few)
    solution = solve(problem, gap=GAP, simplify=False)
    best = best_by_enumeration(replace(problem, mixtures=(), plans=fastest(every_plan(stock))))
    assert (solution.steps_per_s if solution else 0.0) == pytest.approx(best, rel=2 * GAP)
    if solution is not None:
        assert verification.violations(problem, solution) == []


def test_prices_leave_out_no_unlisted_trainer_that_reaches_the_rate() -> None:
    """What is left once everything was listed is what could not reach the rate anyway."""
    stock = {device("a"): 5, device("b", flops=150e12, price_per_hour=1.0): 7}
    built = stock_problem(stock, MODEL, workload(), max_staleness=2)
    listed = replace(built, mixtures=(), plans=tuple(every_plan(stock)))
    few, all_of_them = solve(built, gap=GAP, simplify=False), solve(listed, gap=GAP, simplify=False)
    assert few is not None
    assert all_of_them is not None
    assert few.steps_per_s == pytest.approx(all_of_them.steps_per_s, rel=2 * GAP)


def test_a_trainer_is_taken_once() -> None:
    stock = {device("a"): 3, device("b", flops=150e12, price_per_hour=1.0): 3}
    built: Problem = stock_problem(stock, MODEL, workload(), max_staleness=2)
    table = MixtureTable.of(built)
    left = UnlistedPlans(table, RateLoad(built, 1e-6))
    taken = [left.taken(built)[0] for _ in range(len(table))]
    assert left.most_room == -np.inf
    assert len({(plan.count("a"), plan.count("b")) for plan in taken}) == len(table)
