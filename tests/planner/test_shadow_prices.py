"""ShadowPrices never leave out what can be done: no trainer that reaches a rate, no replicas that it reaches it with."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.planner.milp import Program
from rollover.planner.optimum import solve
from rollover.planner.problem import stock_problem
from rollover.planner.rate_demand import RateDemand
from rollover.planner.records import Problem
from rollover.planner.shadow_prices import PriceBounds, ShadowPrices
from tests.planner.kit import MODEL, choices, device, problems, rate_of, workload

ROUNDING = 1e-6


@settings(max_examples=20, deadline=None)
@given(problems(updates=True), st.sampled_from(["none", "soft"]), st.randoms(use_true_random=False))
def test_what_can_be_done_is_bearable_at_any_prices(problem: Problem, tail: str, random: object) -> None:
    problem = replace(problem, tail=tail)
    every = list(choices(problem))
    random.shuffle(every)  # type: ignore[attr-defined]
    for replicas, plan in islice(every, 3):
        rate = rate_of(problem, replicas, plan) * (1 - ROUNDING)
        if rate > ROUNDING:
            demand = RateDemand(problem, rate)
            bounds, able, index = PriceBounds(demand), demand.able(), problem.plans.index(plan)
            used = demand.of_type @ (demand.sizes * replicas) + demand.training[index]
            for plans in (able, [index], able[:1], able[-1:]):
                for real in (False, True):
                    prices = bounds.prices(plans, real=real)
                    room = float(bounds.room(prices, used @ demand.costs)[index]) + ROUNDING
                    assert room >= 0
                    assert np.all(replicas <= bounds.most(prices, index, room))


@settings(max_examples=30, deadline=None)
@given(problems())
def test_prices_promise_one_trainer_the_optimum_without_whole_numbers(problem: Problem) -> None:
    # ShadowPrices leave out caches that are held without decoding, and that a part of a replica is none.
    kinds = tuple(replace(kind, tp=1) for kind in problem.replica_kinds)
    problem = replace(problem, replica_kinds=kinds, workload=replace(problem.workload, held_s=0.0))
    demand = RateDemand(problem, 0.5 / max(plan.cycle_s for plan in problem.plans))
    for plan in demand.able():
        program = Program(demand, [plan])
        program.top[program.at["y"]] = np.inf
        program.whole[:] = 0
        most = program.minimise(program.open_share(0.0))
        promised = 1 + PriceBounds(demand).promise([plan])
        assert promised == pytest.approx(-most.objective if most else 0.0, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("rate", [1.0, 1e-3, 1e-6, 1e-9, 1e-12])
def test_a_bound_without_time_for_the_longest_response_has_no_rate(rate: float) -> None:
    built = stock_problem({device(): 4}, MODEL, workload(), max_staleness=0)
    problem = replace(built, tail="hard")
    demand = RateDemand(problem, rate * 0.9 / max(plan.cycle_s for plan in problem.plans))
    bounds, able = PriceBounds(demand), demand.able()
    assert not demand.in_time(able).any()
    for real in (False, True):
        prices = bounds.prices(able, real=real)
        assert np.all(bounds.room(prices, 1e6)[able] == -np.inf)
    assert bounds.promise(able) == -1
    assert solve(problem) is None


@settings(max_examples=30, deadline=None)
@given(problems(updates=True), st.sampled_from(["none", "soft", "hard"]), st.floats(1e-9, 1.0))
def test_a_plan_is_priced_on_just_the_replicas_that_it_may_use(problem: Problem, tail: str, part: float) -> None:
    problem = replace(problem, tail=tail)
    demand = RateDemand(problem, part / min(plan.cycle_s for plan in problem.plans))
    for plan in demand.able():
        possible = bool(demand.in_time([plan]).any(axis=0).all())
        some = ShadowPrices(limits=np.ones(len(demand.stock) + 2), real=0.0)
        assert bool(np.isfinite(PriceBounds(demand).room(some)[plan])) == possible


def test_a_load_that_costs_nothing_is_promised_without_end() -> None:
    problem = stock_problem({device(): 4}, MODEL, workload(), max_staleness=1)
    demand = RateDemand(problem, 0.1 / max(plan.cycle_s for plan in problem.plans))
    free = ShadowPrices(limits=np.zeros(len(demand.stock) + 2), real=0.0)
    assert np.all(PriceBounds(demand).beyond(free) == np.inf)
