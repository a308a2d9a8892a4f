"""Decides how much to collect at a time, and how far to let it run: rounds, in closed form. ``docs/theory.md`` derives
it.

A *round* collects m batches under one set of weights, stops, trains them one after another, and is followed by the
next: unfinished samples continue in it. Let it run for D decode iterations. A sample of length L then ends in its ``j =
ceil(L / D)``-th round, so that

* r = E[j] batches' worth of work is in flight for each batch that is trained;
* an iteration's cost is shared by m batches: K = D / m for each;
* samples that continue in a later round are prefilled again if new weights cost them their caches;
* a token decoded in the i-th round of a sample that ends in its j-th is ``m (j - i)`` versions older, and all tokens of
  the k-th batch of a round, k = 0 .. m - 1, are k versions older still. Each batch of a round has the same mix of
  lengths (``stratified``), so that its mean lag is ``(m - 1) / 2`` and what was carried over.

All of this follows from the lengths alone. High throughput requires a small K and little prefill; only one number of
the machine matters, the tokens that it prefills in the time of an iteration. Rounds of two kinds in turn reach any mean
lag between theirs, at the mean of their costs: rounds of 1, 1 and 2 batches have a mean lag of 1/4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rollover.rollout.records import GroupRecord
    from rollover.rollout.statistics import RecentLengths

MOST_BATCHES = 64
"""Maximum number of batches in a round."""
_LEVELS = np.linspace(0.3, 1.0, 36)
"""Shares of groups that may end within a round."""
_SAME = 1.01
"""Times that differ by less than this factor count as equal: younger tokens decide, and rounds that carry nothing over,
whose consequences do not depend on how many samples are about to end when the round does."""


_ENOUGH = 2048
"""Number of groups that suffices to show how lengths are distributed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A way of collecting batches, and its consequences in a steady state."""

    num_batches: int
    """m: the number of batches that are trained from it."""
    iterations: int
    """D: the number of decode iterations after which it is stopped."""
    ratio: float
    """r: groups in flight at its start, divided by the groups that it trains."""
    lag: float
    """Mean lag of its batches, in versions."""
    iterations_per_batch: float
    """K."""
    prefilled_per_batch: float
    """Response tokens of resumed samples, if caches are lost between rounds."""
    num_untrained: int = 0
    """g: batches that may still be untrained when the next round begins, if it overlaps with training."""


ONE_BY_ONE = Round(num_batches=1, iterations=0, ratio=1.0, lag=0.0, iterations_per_batch=0.0, prefilled_per_batch=0.0)
"""Synchronous rollout, the only choice before any length is known."""


@lru_cache(maxsize=64)
def best_rounds(
    lengths: RecentLengths,
    *,
    target_lag: float,
    max_staleness: int,
    batch_size: int,
    num_running: float = np.inf,
    prefill_tokens_per_iteration: float = np.inf,
) -> tuple[Round, Round]:
    """Return two rounds, the younger one first, between whose lags ``target_lag`` lies: taking turns, so that the mean
    lag is the target, they need the least time per batch, counted in iterations, among all rounds whose tokens are
    never more than ``max_staleness`` versions old. Both are the same if more lag gains nothing.

    Args:
        batch_size: groups in a batch.
        num_running: samples that can be decoded at the same time; any others wait until some end.
        prefill_tokens_per_iteration: tokens that are prefilled in the time of an iteration; infinite if caches are
            kept.
    """
    if not lengths.groups:
        return ONE_BY_ONE, ONE_BY_ONE
    rounds = rounds_within(lengths, max_staleness, batch_size, num_running)
    return around(target_lag, rounds, prefill_tokens_per_iteration)


def around(target_lag: float, rounds: list[Round], prefill_tokens_per_iteration: float) -> tuple[Round, Round]:
    """Return the two corners of the lower hull of cost over lag between which ``target_lag`` lies."""
    hull = _hull(
        rounds,
        lambda r: (
            (r.iterations_per_batch + r.prefilled_per_batch / prefill_tokens_per_iteration)
            * (_SAME if r.ratio > 1 else 1)
        ),
    )
    above = next((i for i, found in enumerate(hull) if found.lag > target_lag), len(hull))
    return hull[max(0, above - 1)], hull[min(above, len(hull) - 1)]


def rounds_within(lengths: RecentLengths, max_staleness: int, batch_size: int, num_running: float) -> list[Round]:
    """Return the rounds that keep the staleness bound."""
    tokens_PG = some_of(lengths, _ENOUGH)
    size = tokens_PG.shape[1]
    longest_P, tokens = tokens_PG.max(axis=1), float(tokens_PG.sum())
    found = []
    for stop in stops_of(longest_P, _LEVELS):
        ratio, most, carried, again = _carried(tokens_PG, longest_P, stop)
        for m in range(1, min((max_staleness + 1) // int(most), MOST_BATCHES) + 1):
            waiting = max(0.0, m * ratio * batch_size * size - num_running) * tokens / tokens_PG.size
            found.append(
                Round(
                    num_batches=m,
                    iterations=int(stop),
                    ratio=ratio,
                    lag=(m - 1) / 2 + m * carried / tokens,
                    iterations_per_batch=(float(stop) + waiting / num_running) / m,
                    prefilled_per_batch=again * batch_size,
                )
            )
    return found


def _hull(rounds: list[Round], cost: Callable[[Round], float]) -> list[Round]:
    """Return the rounds that no mixture of others beats, by their lag, as far as a lower cost is worth counting."""
    hull: list[Round] = []
    least = min(map(cost, rounds)) * _SAME
    for found in sorted(rounds, key=lambda r: (r.lag, cost(r))):
        if hull and (cost(found) >= cost(hull[-1]) or cost(hull[-1]) <= least):
            continue
        while len(hull) > 1 and (cost(hull[-1]) - cost(hull[-2])) * (found.lag - hull[-1].lag) >= (
            cost(found) - cost(hull[-1])
        ) * (hull[-1].lag - hull[-2].lag):
            hull.pop()
        hull.append(found)
    return hull


def stratified(groups: Sequence[GroupRecord], batch_size: int) -> list[GroupRecord]:
    """Return a batch with the same mix of lengths as all of ``groups``, which are enough for one: of each of as many
    strata as a batch has groups, the longest and the shortest one in turn.
    """
    ordered = sorted(groups, key=lambda g: (-sum(s.num_tokens for s in g.samples), g.group_id))
    ends = [len(ordered) * i // batch_size for i in range(batch_size + 1)]
    return [ordered[ends[i + 1] - 1 if i % 2 else ends[i]] for i in range(batch_size)]


def stops_of(longest_P: NDArray[np.float64], levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the numbers of iterations after which a round may be stopped: those by which these shares of the groups
    have ended, and parts of the longest."""
    stops = np.concatenate([np.quantile(longest_P, levels, method="higher"), longest_P.max() / np.arange(1, 5)])
    return np.ceil(np.unique(stops[stops >= 1]))


def some_of(lengths: RecentLengths, enough: int) -> NDArray[np.float64]:
    """Return a regular selection of the groups in order of their longest response, beginning with the longest; shorter
    groups are filled up with 0."""
    size = max(map(len, lengths.groups))
    ordered = sorted(lengths.groups, key=max, reverse=True)[:: -(-len(lengths.groups) // enough)]
    return np.array([g + (0,) * (size - len(g)) for g in ordered], dtype=np.float64)


def _carried(
    tokens_PG: NDArray[np.float64], longest_P: NDArray[np.float64], stop: float
) -> tuple[float, float, float, float]:
    """Describe groups that are stopped every ``stop`` iterations until their longest sample ends: the mean and the
    largest number of rounds that one takes part in; the rounds between decoding and training, summed over tokens; and
    the tokens present when a sample resumes, summed over its resumes, as a mean over groups."""
    rounds_P = np.ceil(longest_P / stop)
    whole_PG, rest_PG = np.divmod(tokens_PG, stop)
    decoded_PG = stop * whole_PG * (whole_PG + 1) / 2 + rest_PG * (whole_PG + 1)  # round numbers, summed over tokens
    resumes_PG = np.maximum(0, np.ceil(tokens_PG / stop) - 1)
    again_PG = stop * resumes_PG * (resumes_PG + 1) / 2
    return (
        float(rounds_P.mean()),
        float(rounds_P.max()),
        float((rounds_P[:, None] * tokens_PG - decoded_PG).sum()),
        float(again_PG.sum(axis=1).mean()),
    )
