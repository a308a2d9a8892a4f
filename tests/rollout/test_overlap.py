"""Overlapped rounds in closed form, against the simulator, which knows none of it; and that the gate holds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.rollout.overlap import Machine, _Phases, best_overlapped_rounds
from rollover.rollout.round import ONE_BY_ONE, Round
from rollover.rollout.state import View
from rollover.rollout.statistics import IterationPace, RecentLengths
from rollover.rollout.strategies.rollover import OverlappedRollover, Rollover
from rollover.sim.result import Window
from rollover.sim.run import simulate
from rollover.sim.scenario import Latency
from rollover.workload.source import PRESETS
from rollover.workload.trace import Trace, TracePrompt
from tests.rollout.kit import config_of, strategy_of
from tests.sim.kit import one_replica

N, G = 12, 2
GROUPS = st.lists(st.tuples(st.integers(20, 400), st.integers(20, 400)), min_size=N, max_size=N)


class Repeated(OverlappedRollover):
    """Collects the same round again and again."""

    __slots__ = ()
    found: Round = ONE_BY_ONE

    def round(self, view: View) -> Round:
        return self.found


@settings(max_examples=15, deadline=None)
@given(
    GROUPS, st.integers(1, 3), st.integers(0, 3), st.sampled_from([10.0, 100.0, 900.0]), st.sampled_from([8.0, 1e12])
)
def test_the_closed_form_comes_about(groups: list[tuple[int, int]], m: int, g: int, training: float, b0: float) -> None:
    """The same prompts again and again, so that rounds repeat themselves. If whole groups are trained in turn, as the
    closed form takes them, it is off by one token of each sample for each of the m versions of a round: an iteration that
    is under way has them already. A trainer that is late finds more groups whole, and takes them in another order: then
    the lag is lower."""
    g = min(g, m)
    longest = max(map(max, groups))
    machine = Machine(training=training, b0=b0)
    form = _Phases(np.array(groups, dtype=float), longest).rounds(m, g, N, machine)[g]
    strategy = Repeated(
        batch_size=N,
        group_size=G,
        max_staleness=60,
        target_lag=1.0,
        num_running=2**31,
        prefill_tokens_per_iteration=math.inf,
    )
    Repeated.found = form
    prompts = tuple(TracePrompt(prompt_id=str(i), prompt_tokens=0, lengths=group) for i, group in enumerate(groups))
    trace = Trace(name="same", cap_tokens=400, prompts=prompts)
    scenario = one_replica(b0=b0, kv_on_update="keep", trainer=Latency(base_s=training))
    found = simulate(strategy, trace.workload(), scenario, steps=24 * m)
    late = Window(found.steps[12 * m : 18 * m])
    assert late.seconds / (6 * m) == pytest.approx(form.iterations_per_batch, rel=0.02)
    parts = np.split(np.array(sorted(groups, key=max)), m)
    in_turn = all(
        sorted(step.lengths) == sorted(m * part.ravel().tolist())
        for step, part in zip(late.steps[:m], parts, strict=True)
    )
    most = m / np.mean(groups) if in_turn else math.inf
    assert -0.005 <= form.lag - late.lag.batch <= most + 0.005
    assert in_turn or m > 1
    assert late.lag.max <= m - 1 + g


def test_before_any_length_is_known_batches_are_collected_one_by_one() -> None:
    found = best_overlapped_rounds(
        RecentLengths(), target_lag=2.0, max_staleness=4, batch_size=N, machine=Machine(training=9.0)
    )
    assert found == (ONE_BY_ONE, ONE_BY_ONE)


@pytest.mark.parametrize(("training", "target"), [(100.0, 0.0), (100.0, 0.7), (100.0, 1.6), (1000.0, 0.5), (9e3, 1.0)])
def test_the_target_lies_between_two_rounds_within_the_bound(training: float, target: float) -> None:
    workload = PRESETS["r1-16k"].workload(1)
    lengths = RecentLengths(tuple(workload.group_lengths(i, 8) for i in range(300)))
    machine = Machine(training=training, b0=256.0)
    younger, older = best_overlapped_rounds(lengths, target_lag=target, max_staleness=4, batch_size=32, machine=machine)
    assert younger.lag <= target
    assert older.lag > target or older is younger
    assert older.num_batches - 1 + older.num_untrained <= 4
    assert older.iterations_per_batch <= younger.iterations_per_batch


def test_few_lengths_describe_rounds_of_few_batches() -> None:
    lengths = RecentLengths(((300, 20), (40, 35)))
    younger, older = best_overlapped_rounds(
        lengths, target_lag=2.0, max_staleness=4, batch_size=2, machine=Machine(training=20.0, b0=8.0)
    )
    assert older.num_batches <= 2 and younger.lag <= 2.0 and math.isfinite(older.lag)


def test_all_phases_at_once_are_the_sum_of_each() -> None:
    draw = np.random.default_rng(3)
    found = _Phases(draw.integers(1, 400, (40, 4)).astype(np.float64), 60.0)
    phases = np.sort(draw.uniform(0, 60, 9))
    starts = 60.0 * np.arange(7)[:, None, None]  # of the rounds
    after_P, present = np.zeros(40), 0.0
    for phase in phases:
        left = np.clip(found._tokens_PG - starts, 0.0, 60.0) - phase
        after_P += np.maximum(0.0, left).sum(axis=(0, 2))
        present += ((starts + phase) * (left > 0)).sum() / 40
    sums_P, total = found._at(phases)
    assert sums_P == pytest.approx(after_P) and total == pytest.approx(present)


def test_the_pace_of_iterations_is_measured() -> None:
    pace = IterationPace()
    for running, tokens, seconds in [(10, 1000, 2.0), (30, 1000, 1.0)]:
        start_s = pace._now_s
        pace.moved(start_s, running)
        pace.moved(start_s + seconds, 0, tokens)
        pace.published()
    assert pace.c0_s == pytest.approx(0.015)
    assert pace.b0 == pytest.approx(30.0)


def run(share: float, **options: Any) -> Window:
    """``r1-16k`` with a trainer that takes ``share`` of the loop of synchronous rollout, which decodes for 22,600."""
    law = PRESETS["r1-16k"]
    kind = options.pop("kind", "rollover")
    config = config_of(kind, rollout_batch_size=32, group_size=8, max_new_tokens=law.cap_tokens, **options)
    scenario = one_replica(b0=256.0, kv_on_update="keep", trainer=Latency(base_s=22_600 * share / (1 - share)))
    return simulate(config.build_strategy(scenario.capabilities), law.workload(0), scenario, steps=48).after(16)


def test_it_is_faster_than_bounded_async_at_its_lag() -> None:
    rival = run(0.2, kind="bounded_async", max_staleness=1)
    ours = run(0.2, overlap=True, lag_target=rival.lag.batch, max_staleness=8)
    assert ours.lag.batch == pytest.approx(rival.lag.batch, rel=0.08)
    assert ours.tokens_per_s > 1.03 * rival.tokens_per_s


def test_a_trainer_that_takes_half_is_kept_busy_one_step_off_policy() -> None:
    window = run(0.5, overlap=True, lag_target=1.0, max_staleness=8)
    assert window.lag.max == 1
    assert window.seconds / len(window.steps) < 1.03 * 22_600


def test_overlap_decides_whether_generation_stops() -> None:
    assert type(strategy_of("rollover")) is Rollover
    assert type(strategy_of("rollover", overlap=True)) is OverlappedRollover
    assert config_of("rollover", overlap=True).strategy.overlaps_training
