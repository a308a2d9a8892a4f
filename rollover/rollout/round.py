"""Decides how much to collect at a time, and how far to let it run: rounds, in closed form. ``docs/theory.md`` derives
it.

A *round* collects m batches under one set of weights, stops, trains them one after another, and is followed by the
next: unfinished samples continue in it. Let it run for D decode iterations. A sample of length L then ends in its ``j =
ceil(L / D)``-th round, so that

* r = E[j] batches' worth of work is in flight for each batch that is trained;
* an iteration's cost is shared by m batches: K = D / m for each;
* samples that continue in a later round are prefilled again if new weights cost them their caches;
* a token decoded in the i-th round of a sample that ends in its j-th is ``m (j - i)`` versions older, and all tokens of
  the k-th batch of a round, k = 0 .. m - 1, are k versions older still. The longest responses are trained first, so
  that few tokens wait.

All of this follows from the lengths alone. High throughput requires a small K and little prefill; only one number of
the machine matters, the tokens that it prefills in the time of an iteration.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rollover.rollout.statistics import RecentLengths

_MOST_BATCHES = 64
"""Maximum number of batches in a round."""
_LEVELS = np.linspace(0.3, 1.0, 36)
"""Shares of groups that may end within a round."""
_SAME = 1.01
"""Times that differ by less than this factor count as equal; the younger tokens decide."""


_ENOUGH = 2048
"""Number of groups that suffices to show how lengths are distributed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A way of collecting batches, and its consequences in a steady state.

    Example: a round of 1,024 iterations from which two batches are trained has ``iterations_per_batch`` 512.0 if no
    sample has to wait for a place.
    """

    num_batches: int
    """m: the number of batches that are trained from it."""
    iterations: int
    """D: the number of decode iterations after which it is stopped."""
    ratio: float
    """r: groups in flight at its start, divided by the groups that it trains."""
    lag: float
    """Mean lag of trained tokens, in versions."""
    iterations_per_batch: float
    """K."""
    prefilled_per_batch: float
    """Response tokens of resumed samples, if caches are lost between rounds."""


ONE_BY_ONE = Round(num_batches=1, iterations=0, ratio=1.0, lag=0.0, iterations_per_batch=0.0, prefilled_per_batch=0.0)
"""Synchronous rollout, the only choice before any length is known."""


@lru_cache(maxsize=64)
def best_round(
    lengths: RecentLengths,
    *,
    max_lag: float,
    max_staleness: int,
    batch_size: int,
    num_running: float = np.inf,
    prefill_tokens_per_iteration: float = np.inf,
) -> Round:
    """Return the round that takes least time, counted in iterations per batch, among those whose tokens are on average
    at most ``max_lag`` versions old, and never more than ``max_staleness``.

    Args:
        batch_size: groups in a batch.
        num_running: samples that can be decoded at the same time; any others wait until some end.
        prefill_tokens_per_iteration: tokens that are prefilled in the time of an iteration; infinite if caches are
            kept.
    """
    if not lengths.groups:
        return ONE_BY_ONE
    tokens_PG = _some_of(lengths)
    size = tokens_PG.shape[1]
    longest_P, total_P = tokens_PG.max(axis=1), tokens_PG.sum(axis=1)
    stops = np.unique(
        np.concatenate([np.quantile(longest_P, _LEVELS, method="higher"), longest_P.max() / np.arange(1, 5)])
    )
    stops = np.ceil(stops[stops >= 1])
    choices = range(1, min(max_staleness + 1, _MOST_BATCHES) + 1)
    num_batches_M1 = np.array(choices)[:, None]

    found = [_carried(tokens_PG, longest_P, stop) for stop in stops]
    ratio_D, most_D, carried_D, again_D = (np.array(column) for column in zip(*found, strict=True))
    behind_M = np.array([_behind(total_P, m) for m in choices])
    lag_MD = behind_M[:, None] + num_batches_M1 * carried_D / total_P.sum()
    pool_MD = num_batches_M1 * ratio_D * batch_size * size
    waiting_MD = np.maximum(0.0, pool_MD - num_running) * (total_P.mean() / size)
    iterations_MD = (stops + waiting_MD / num_running) / num_batches_M1
    prefilled_D = again_D * batch_size

    allowed_MD = (lag_MD <= max_lag) & (num_batches_M1 * most_D <= max_staleness + 1)
    if not allowed_MD.any():
        return ONE_BY_ONE
    cost_MD = np.where(allowed_MD, iterations_MD + prefilled_D / prefill_tokens_per_iteration, np.inf)
    alike_MD = cost_MD <= cost_MD.min() * _SAME
    m, d = np.unravel_index(np.where(alike_MD, lag_MD, np.inf).argmin(), lag_MD.shape)
    return Round(
        num_batches=choices[m],
        iterations=int(stops[d]),
        ratio=float(ratio_D[d]),
        lag=float(lag_MD[m, d]),
        iterations_per_batch=float(iterations_MD[m, d]),
        prefilled_per_batch=float(prefilled_D[d]),
    )


def _some_of(lengths: RecentLengths) -> NDArray[np.float64]:
    """Return a regular selection of the groups in order of their longest response, beginning with the longest; shorter
    groups are filled up with 0."""
    size = max(map(len, lengths.groups))
    ordered = sorted(lengths.groups, key=max, reverse=True)[:: -(-len(lengths.groups) // _ENOUGH)]
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
        rounds_P.mean(),
        rounds_P.max(),
        float((rounds_P[:, None] * tokens_PG - decoded_PG).sum()),
        again_PG.sum(axis=1).mean(),
    )


def _behind(total_P: NDArray[np.float64], num_batches: int) -> float:
    """Return the mean over tokens of the number of batches trained before theirs, when groups with most tokens come
    first."""
    ordered_P = -np.sort(-total_P)
    place_P = (np.arange(len(ordered_P)) + 0.5) / len(ordered_P)
    return float((ordered_P * np.floor(num_batches * place_P)).sum() / ordered_P.sum())
