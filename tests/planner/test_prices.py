"""Prices never leave out what can be done: no trainer that reaches a rate, no replicas that it reaches it with."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.planner.load import Load
from rollover.planner.prices import Market
from rollover.planner.program import Program
from rollover.planner.records import Problem
from tests.planner.kit import choices, problems, rate_of

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
            load = Load(problem, rate)
            market, able, index = Market(load), load.able(), problem.plans.index(plan)
            used = load.kinds @ (load.sizes * replicas) + load.training[index]
            for plans in (able, [index], able[:1], able[-1:]):
                for real in (False, True):
                    prices = market.prices(plans, real=real)
                    room = float(market.room(prices, used @ load.costs)[index]) + ROUNDING
                    assert room >= 0
                    assert np.all(replicas <= market.most(prices, index, room))


@settings(max_examples=30, deadline=None)
@given(problems())
def test_what_prices_promise_one_trainer_is_the_optimum_without_whole_numbers(problem: Problem) -> None:
    # Prices leave out caches that are held without decoding, and that a part of a replica is none.
    columns = tuple(replace(column, tp=1) for column in problem.columns)
    problem = replace(problem, columns=columns, workload=replace(problem.workload, held_s=0.0))
    load = Load(problem, 0.5 / max(plan.cycle_s for plan in problem.plans))
    for plan in load.able():
        program = Program(load, [plan])
        program.top[program.at["y"]] = np.inf
        program.whole[:] = 0
        most = program.minimise(program.open_share(0.0))
        promised = 1 + Market(load).promise([plan])
        assert promised == pytest.approx(-most.objective if most else 0.0, rel=1e-5, abs=1e-7)
