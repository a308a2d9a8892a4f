"""Rounds in closed form, against counting round by round, token by token."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.rollout.round import ONE_BY_ONE, Round, best_round
from rollover.rollout.statistics import RecentLag, RecentLengths
from tests.rollout.kit import strategy_of

Groups = tuple[tuple[int, ...], ...]
GROUPS = st.lists(st.lists(st.integers(1, 30), min_size=2, max_size=2).map(tuple), min_size=12, max_size=12).map(tuple)


def counted(groups: Groups, num_batches: int, stop: int) -> tuple[float, float, int, float]:
    """With the same groups admitted to every round, once that has gone on for long: groups in flight per group trained,
    mean age of tokens, greatest age, tokens prefilled again per group trained."""
    waiting: list[tuple[tuple[int, ...], int]] = []
    over: list[tuple[tuple[int, ...], int]] = []
    num_in_flight = now = again = 0
    for now in range(-(-max(map(max, groups)) // stop)):
        waiting += [(group, now) for group in groups]
        num_in_flight = len(waiting)
        there = [(now - begun) * stop for _, begun in waiting]
        again = sum(n for (group, _), n in zip(waiting, there, strict=True) for length in group if 0 < n < length)
        over = [(g, begun) for g, begun in waiting if max(g) <= (now - begun + 1) * stop]
        waiting = [(g, begun) for g, begun in waiting if max(g) > (now - begun + 1) * stop]
    over.sort(key=lambda entry: -sum(entry[0]))
    size = len(over) // num_batches
    ages = [
        (now - begun - token // stop) * num_batches + place // size
        for place, (group, begun) in enumerate(over)
        for length in group
        for token in range(length)
    ]
    return num_in_flight / len(groups), sum(ages) / len(ages), max(ages), again / len(groups)


def best(
    groups: Groups, *, max_lag: float, max_staleness: int = 11, num_running: float = 1e9, prefill: float = math.inf
) -> Round:
    return best_round(
        RecentLengths(groups),
        max_lag=max_lag,
        max_staleness=max_staleness,
        batch_size=12,
        num_running=num_running,
        prefill_tokens_per_iteration=prefill,
    )


PREFILL = st.sampled_from([2.0, 20.0, math.inf])


@given(GROUPS, st.floats(0, 6), PREFILL)
def test_it_leads_to_what_it_says(groups: Groups, max_lag: float, prefill: float) -> None:
    found = best(groups, max_lag=max_lag, prefill=prefill)
    if 12 % found.num_batches or not found.iterations:  # batches of unequal size are a matter of rounding
        return
    ratio, lag, oldest, again = counted(groups, found.num_batches, found.iterations)
    assert found.ratio == pytest.approx(ratio)
    assert found.lag == pytest.approx(lag)
    assert lag <= max_lag + 1e-9
    assert oldest <= 11
    assert found.iterations_per_batch == pytest.approx(found.iterations / found.num_batches)
    assert found.prefilled_per_batch == pytest.approx(12 * again)


@given(GROUPS, st.sampled_from([0.3, 1.0, 2.5]), PREFILL)
def test_no_other_takes_less_time(groups: Groups, max_lag: float, prefill: float) -> None:
    """All stops by which a third of the groups or more end, and all divisors of the 12 groups: one within both limits is
    no faster by more than the margin within which younger tokens are preferred."""
    found = best(groups, max_lag=max_lag, prefill=prefill)
    time = found.iterations_per_batch + found.prefilled_per_batch / prefill
    for num_batches in (1, 2, 3, 4, 6, 12):
        for stop in sorted(map(max, groups))[3:]:
            _, lag, _, again = counted(groups, num_batches, stop)
            most = -(-max(map(max, groups)) // stop) * num_batches
            if lag <= max_lag and most <= 12:
                assert time <= 1.01 * (stop / num_batches + 12 * again / prefill) + 1e-9


def test_before_any_length_is_known_batches_are_collected_one_by_one() -> None:
    assert best((), max_lag=3.0) == ONE_BY_ONE


def test_without_a_lag_a_round_is_a_synchronous_round() -> None:
    found = best(((3, 9), (4, 4), (20, 1)) * 4, max_lag=0.0)
    assert (found.num_batches, found.iterations, found.ratio, found.lag) == (1, 20, 1.0, 0.0)


def test_stragglers_are_carried_over_and_a_crowd_at_the_cap_is_not() -> None:
    """2 % of responses forty times as long as the rest are left for later rounds; where a third is, more batches are
    trained from one collection."""
    few = best(((10,),) * 490 + ((400,),) * 10, max_lag=0.9, max_staleness=99)
    many = best(((10,),) * 320 + ((400,),) * 180, max_lag=0.9, max_staleness=99)
    assert few.ratio > 1 and few.iterations < 400
    assert many.ratio == 1 and many.iterations == 400 and many.num_batches > 1


def test_stragglers_are_waited_for_if_prefilling_again_takes_longer() -> None:
    groups = ((10,),) * 490 + ((400,),) * 10
    carried, waited = (best(groups, max_lag=0.9, max_staleness=99, prefill=rate) for rate in (1000.0, 0.1))
    assert carried.ratio > 1 and carried.prefilled_per_batch > 0
    assert waited.ratio == 1 and waited.prefilled_per_batch == 0


def test_no_more_batches_are_collected_than_shorten_the_step() -> None:
    """With 12 samples at a time the engine is busy whatever is collected: more would only be older."""
    groups = ((10,),) * 48
    assert best(groups, max_lag=9.0, num_running=12).num_batches == 1
    assert best(groups, max_lag=9.0).iterations_per_batch == pytest.approx(10 / 12)


def test_what_order_is_worth() -> None:
    """rho = E[min(L, L')] / E[L]: longest first tokens wait (m rho - 1) / 2, (m - 1) / 2 in random order, and m rho / 2
    where the shortest are trained while the others decode, under weights that change in flight."""
    num = 2048
    lengths = np.sort(np.concatenate([np.linspace(1, 1000, num * 3 // 4), np.full(num // 4, 2000)]).round())
    below = (np.arange(num) + 0.5) / num  # F(L)
    rho = (lengths * 2 * (1 - below)).sum() / lengths.sum()
    found = best(tuple((int(n),) for n in lengths), max_lag=4.0, max_staleness=60)
    m = found.num_batches
    assert m > 8
    assert found.ratio == 1  # a quarter at the cap is not carried over
    assert found.lag == pytest.approx((m * rho - 1) / 2, abs=0.02)
    assert (m - 1) / 2 > 4 / rho - 1

    tokens = np.arange(2000) + 0.5
    updates = np.floor(m * np.searchsorted(lengths, tokens) / num)  # before each token
    before = np.concatenate([[0.0], updates.cumsum()])
    in_flight = (lengths * np.floor(m * below) - before[lengths.astype(int)]).sum() / lengths.sum()
    assert in_flight == pytest.approx(m * rho / 2, rel=0.03)


@pytest.mark.parametrize(("mean", "max_lag"), [(1.0, 1.0), (0.8, 1.1), (1.2, 0.9), (0.0, 1.25), (3.0, 0.8)])
def test_unused_lag_is_made_available_over_sixteen_batches(
    mean: float, max_lag: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(
        "rollover.rollout.strategies.rollover.best_round", lambda lengths, *, max_lag, **_: asked.append(max_lag)
    )
    lag = RecentLag(num_batches=8.0, num_tokens=100.0, sum_of_lags=100.0 * mean)
    view = SimpleNamespace(statistics=SimpleNamespace(lag=lag, lengths=None), ledger=SimpleNamespace(next_step=100))
    strategy_of("rollover", rollout_batch_size=4, lag_target=1.0).round(view)  # type: ignore[attr-defined]
    assert asked == [pytest.approx(max_lag)]  # the target plus (target - mean) * 8 / 16, at most a quarter away
