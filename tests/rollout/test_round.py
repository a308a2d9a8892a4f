"""Rounds in closed form, against counting round by round, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.rollout.round import ONE_BY_ONE, Round, best_rounds, stratified
from rollover.rollout.statistics import RecentLengths, RecentMean
from rollover.workload.source import PRESETS
from tests.rollout.kit import strategy_of

Groups = tuple[tuple[int, ...], ...]
GROUPS = st.lists(st.lists(st.integers(1, 30), min_size=2, max_size=2).map(tuple), min_size=12, max_size=12).map(tuple)


def counted(groups: Groups, num_batches: int, stop: int) -> tuple[float, float, int, float]:
    """With the same groups admitted to every round, once that has gone on for long: groups in flight per group trained,
    mean over batches of the mean age of their tokens, greatest age, tokens prefilled again per group trained. Each
    batch of a round is an equal share of all of its groups."""
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
    ages = [
        (now - begun - token // stop) * num_batches + place
        for place in range(num_batches)
        for group, begun in over
        for length in group
        for token in range(length)
    ]
    return num_in_flight / len(groups), sum(ages) / len(ages), max(ages), again / len(groups)


def best(
    groups: Groups, *, target: float, max_staleness: int = 11, num_running: float = 1e9, prefill: float = math.inf
) -> tuple[Round, Round]:
    return best_rounds(
        RecentLengths(groups),
        target_lag=target,
        max_staleness=max_staleness,
        batch_size=12,
        num_running=num_running,
        prefill_tokens_per_iteration=prefill,
    )


PREFILL = st.sampled_from([2.0, 20.0, math.inf])


@given(GROUPS, st.floats(0, 6), PREFILL)
def test_both_lead_to_what_they_say(groups: Groups, target: float, prefill: float) -> None:
    younger, older = best(groups, target=target, prefill=prefill)
    assert younger.lag <= target
    assert older.lag > target or older is younger
    for found in (younger, older):
        ratio, lag, oldest, again = counted(groups, found.num_batches, found.iterations)
        assert found.ratio == pytest.approx(ratio)
        assert found.lag == pytest.approx(lag)
        assert oldest <= 11
        assert found.iterations_per_batch == pytest.approx(found.iterations / found.num_batches)
        assert found.prefilled_per_batch == pytest.approx(12 * again)


@settings(max_examples=30)
@given(GROUPS, st.sampled_from([0.25, 0.7, 2.5]), PREFILL)
def test_no_other_mixture_takes_less_time(groups: Groups, target: float, prefill: float) -> None:
    """All stops by which a third of the groups or more end: no round within both limits, and no two of them in turn,
    take less time, by more than what is not worth any lag."""

    def cost(found: Round) -> float:
        return found.iterations_per_batch + found.prefilled_per_batch / prefill

    younger, older = best(groups, target=target, prefill=prefill)
    share = (target - younger.lag) / (older.lag - younger.lag) if older is not younger else 0.0
    time = cost(younger) * (1 - share) + cost(older) * share
    points = []
    for num_batches in range(1, 13):
        for stop in sorted(map(max, groups))[3:]:
            _, lag, oldest, again = counted(groups, num_batches, stop)
            if oldest <= 11:
                points.append((lag, stop / num_batches + 12 * again / prefill))
    below = [(lag, spent) for lag, spent in points if lag <= target]
    above = [(lag, spent) for lag, spent in points if lag > target]
    mixed = [spent + (later - spent) * (target - lag) / (age - lag) for lag, spent in below for age, later in above]
    assert time <= 1.01**2 * min([spent for _, spent in below] + mixed) + 1e-9


def test_before_any_length_is_known_batches_are_collected_one_by_one() -> None:
    assert best((), target=3.0) == (ONE_BY_ONE, ONE_BY_ONE)


def test_without_a_lag_a_round_is_a_synchronous_round() -> None:
    found, _ = best(((3, 9), (4, 4), (20, 1)) * 4, target=0.0)
    assert (found.num_batches, found.iterations, found.ratio, found.lag) == (1, 20, 1.0, 0.0)


def test_a_quarter_of_a_version_is_two_rounds_in_three_of_one_batch() -> None:
    """Lengths of which many reach the cap: (1, 1, 2) batches are 0, 0, 0 and 1 versions old."""
    younger, older = best(((100,),) * 12, target=0.25)
    assert (younger.num_batches, younger.lag, older.num_batches, older.lag) == (1, 0.0, 2, 0.5)
    lag, batches = RecentMean(), []
    for _ in range(30):
        found = older if lag.mean <= 0.25 else younger
        batches.append(found.num_batches)
        for age in range(found.num_batches):
            lag = lag.followed_by(age)
    assert batches[3:] in [([1, 1, 2] * 10)[i : i + 27] for i in range(3)]


def test_stragglers_are_carried_over_and_a_crowd_at_the_cap_is_not() -> None:
    """2 % of responses forty times as long as the rest are left for later rounds. If most groups have one, more batches
    are trained from one collection."""
    _, few = best(((10,),) * 490 + ((400,),) * 10, target=0.9, max_staleness=99)
    _, many = best(((10,) * 4,) * 150 + ((10, 10, 10, 400),) * 350, target=0.4, max_staleness=99)
    assert few.ratio > 1 and few.iterations < 400
    assert many.ratio == 1 and many.iterations == 400 and many.num_batches > 1


def test_stragglers_are_waited_for_if_prefilling_again_takes_longer() -> None:
    groups = ((10,),) * 490 + ((400,),) * 10
    (_, carried), (_, waited) = (best(groups, target=0.9, max_staleness=99, prefill=rate) for rate in (1000.0, 0.1))
    assert carried.ratio > 1 and carried.prefilled_per_batch > 0
    assert waited.ratio == 1 and waited.prefilled_per_batch == 0


def test_no_more_batches_are_collected_than_shorten_the_step() -> None:
    """With 12 samples at a time the engine is busy whatever is collected: more would only be older."""
    groups = ((10,),) * 48
    assert [found.num_batches for found in best(groups, target=9.0, num_running=12)] == [1, 1]
    assert best(groups, target=5.4)[1].iterations_per_batch == pytest.approx(10 / 12)


def dealt(tokens: Sequence[int], size: int) -> list[list[int]]:
    """Deal groups with these numbers of tokens to batches."""
    left = [SimpleNamespace(group_id=i, samples=[SimpleNamespace(num_tokens=n)]) for i, n in enumerate(tokens)]
    batches = []
    while left:
        batches.append([g.group_id for g in stratified(left, size)])  # type: ignore[arg-type]
        left = [g for g in left if g.group_id not in batches[-1]]
    return batches


def test_a_batch_takes_the_longest_and_the_shortest_of_strata_in_turn() -> None:
    assert dealt((1, 9, 4, 8, 2, 5), 3)[0] == [1, 2, 4], "of 9 8, 5 4 and 2 1 tokens: 9, 4 and 2"


@given(st.lists(st.integers(1, 500), min_size=24, max_size=24), st.sampled_from([2, 3, 4, 6]))
def test_the_batches_of_a_round_have_the_same_mix_of_lengths(lengths: list[int], num_batches: int) -> None:
    """Each takes one group of each stratum of the groups that are left, so that sums differ by little beside the range."""
    batches = dealt(lengths, 24 // num_batches)
    assert sorted(i for batch in batches for i in batch) == list(range(24))
    sums = [sum(lengths[i] for i in batch) for batch in batches]
    assert max(sums) - min(sums) <= 2 * (max(lengths) - min(lengths))


def test_a_token_mean_of_stratified_batches_is_not_biased() -> None:
    """Long responses are wrong more often. The mean gradient of batches, by what short responses depend on, each
    divided by its tokens, is that of random order. Other aggregations divide by what no order changes."""
    rng, gradients_O = np.random.default_rng(0), np.zeros(42)
    for seed in range(20):
        workload = PRESETS["light-8k"].workload(seed)
        lengths_PG = np.array([workload.group_lengths(i, 8) for i in range(96)])
        rank_PG = lengths_PG.argsort(axis=None).argsort().reshape(lengths_PG.shape) / lengths_PG.size
        rewards_PG = rng.random(lengths_PG.shape) < 0.8 - 0.6 * rank_PG
        advantages_PG = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
        gradients_P = (advantages_PG * lengths_PG * (1 - rank_PG)).sum(axis=1)
        tokens_P = lengths_PG.sum(axis=1)
        orders = [dealt(tokens_P.tolist(), 32), np.argsort(-tokens_P), *(rng.permutation(96) for _ in range(40))]
        batches_OBN = np.array([np.reshape(order, (3, 32)) for order in orders])
        gradients_O += (gradients_P[batches_OBN].sum(2) / tokens_P[batches_OBN].sum(2)).mean(1)
    random = gradients_O[2:].mean()
    assert gradients_O[0] == pytest.approx(random, rel=0.01)
    assert abs(gradients_O[1] / random - 1) > 0.2, "the longest first"


@pytest.mark.parametrize(("mean", "num_batches"), [(0.9, 2), (1.0, 2), (1.1, 1)])
def test_rounds_take_turns_about_the_target(mean: float, num_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = tuple(
        Round(num_batches=m, iterations=9, ratio=1, lag=0, iterations_per_batch=0, prefilled_per_batch=0)
        for m in (1, 2)
    )
    monkeypatch.setattr("rollover.rollout.strategies.rollover.best_rounds", lambda lengths, **_: pair)
    lag = RecentMean(num_batches=8.0, total=8.0 * mean)
    view = SimpleNamespace(statistics=SimpleNamespace(lag=lag, lengths=None), ledger=SimpleNamespace(next_step=100))
    strategy = strategy_of("rollover", rollout_batch_size=4, lag_target=1.0)
    assert strategy.round(view).num_batches == num_batches  # type: ignore[attr-defined]
