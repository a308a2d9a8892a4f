"""Decides about rounds that overlap with training, in closed form, for a trainer with devices of its own.
``docs/theory.md`` derives it.

A round of m batches (``rollover.rollout.round``) is handed to the trainer piece by piece: each N groups that are whole,
at once. New weights are loaded under running samples. Once all but those carried over are whole, and no more than g
batches are untrained, the next round begins. With g = 0 the engine waits for the trainer and no token is older than if
generation stopped; with g = m it waits only for a trainer that is slower than itself, and never runs ahead of it by
more. Rounds of one batch with g = 1 are what asynchronous trainers call one step off-policy.

Consequences follow from the lengths and two numbers of the machine: the iterations in the time of a training step, and
B0, the number of samples at which an iteration takes twice as long. ``Statistics`` measures both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rollover.rollout.round import MOST_BATCHES, ONE_BY_ONE, Round, around, some_of, stops_of

if TYPE_CHECKING:
    from rollover.rollout.statistics import RecentLengths

Floats = NDArray[np.float64]

_LEVELS = np.linspace(0.6, 1.0, 9)
"""Shares of groups that may end within a round."""
_ENOUGH = 256
"""Number of groups that suffices to show how lengths are distributed."""
_ROUNDS_TO_SETTLE = 8
"""Number of rounds after which engine and trainer repeat themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The times that engine and trainer take, in iterations of few samples."""

    training: float = 0.0
    """Time of training a batch and publishing its weights."""
    b0: float = np.inf
    num_running: float = np.inf
    """Samples that can be decoded at the same time; any others wait until some end."""
    prefill_tokens_per_iteration: float = np.inf
    """Tokens that are prefilled in the time of an iteration; infinite if caches are kept."""


@lru_cache(maxsize=64)
def best_overlapped_rounds(
    lengths: RecentLengths, *, target_lag: float, max_staleness: int, batch_size: int, machine: Machine
) -> tuple[Round, Round]:
    """Return two overlapped rounds, the younger one first, between whose lags ``target_lag`` lies, as ``best_rounds``
    does for rounds that stop for the trainer: in turns they take the least time per batch."""
    if not lengths.groups:
        return ONE_BY_ONE, ONE_BY_ONE
    tokens_PG = some_of(lengths, _ENOUGH)
    rounds = []
    for stop in stops_of(tokens_PG.max(axis=1), _LEVELS):
        phases = _Phases(tokens_PG, stop)
        for m in range(1, min((max_staleness + 1) // phases.most, MOST_BATCHES, len(tokens_PG)) + 1):
            most_untrained = min(m, max_staleness + 1 - m * phases.most)
            found = phases.rounds(m, most_untrained, batch_size, machine)
            rounds += found
            if found[0].lag > target_lag:
                break
    return around(target_lag, rounds, machine.prefill_tokens_per_iteration)


class _Phases:
    """Groups by phase: iterations since the current round began. A group whose longest sample has M tokens is whole at
    the phase M - (j - 1) D of its j-th round."""

    def __init__(self, tokens_PG: Floats, stop: float) -> None:
        longest_P = tokens_PG.max(axis=1)
        rounds_P = np.ceil(longest_P / stop)
        self.stop = stop
        self.most = int(rounds_P.max())
        self._ratio = float(rounds_P.mean())
        whole_at_P = longest_P - (rounds_P - 1) * stop
        order_P = np.argsort(whole_at_P, kind="stable")
        self._whole_at_P = whole_at_P[order_P]
        self._tokens_PG = tokens_PG[order_P]
        self._tokens_P = self._tokens_PG.sum(axis=1)
        self._full_PG, self._rest_PG = np.divmod(self._tokens_PG, stop)
        in_round_PG = stop * self._full_PG * (self._full_PG + 1) / 2 + self._rest_PG * (self._full_PG + 1)
        self._carried_P = rounds_P[order_P] * self._tokens_P - in_round_PG.sum(axis=1)
        """Rounds between decoding and training, summed over the tokens of a group."""
        self._grid = np.linspace(0.0, stop, 65)
        self._decoded = np.array([self._before(phase) for phase in self._grid])

    def _before(self, phase: float) -> float:
        """Return the tokens decoded before a phase, as a mean over groups."""
        tokens_PG = self._full_PG * phase + np.minimum(self._rest_PG, phase)
        return float(tokens_PG.sum() / len(tokens_PG))

    def rounds(self, m: int, most_untrained: int, batch_size: int, machine: Machine) -> list[Round]:
        """Return the rounds of ``m`` batches, one for each number of batches that may be untrained."""
        num_groups, size = self._tokens_PG.shape
        waiting = max(0.0, m * self._ratio * batch_size * size - machine.num_running) * self._tokens_PG.mean()
        times = self._grid * (1 + waiting / machine.num_running / self.stop)
        times += m * batch_size * self._decoded / machine.b0
        batch_P = np.arange(num_groups) * m // num_groups
        last_P = np.searchsorted(batch_P, np.arange(m), side="right") - 1
        collected = np.interp(self._whole_at_P[last_P], self._grid, times)
        tokens = np.bincount(batch_P, weights=self._tokens_P, minlength=m)
        waits_P = m * self._carried_P + batch_P * self._tokens_P
        found = []
        for g in range(most_untrained + 1):
            period, num_earlier, published = _timed(list(collected), float(times[-1]), g, machine.training)
            phases = np.interp([at for at in published if at < times[-1]], times, self._grid)
            younger_P, present = self._at(phases)
            ages = np.bincount(batch_P, weights=waits_P + num_earlier * self._tokens_P - younger_P, minlength=m)
            found.append(
                Round(
                    num_batches=m,
                    iterations=int(self.stop),
                    ratio=self._ratio,
                    lag=float((ages / tokens).mean()),
                    iterations_per_batch=period / m,
                    prefilled_per_batch=present * batch_size,
                    num_untrained=g,
                )
            )
        return found

    def _at(self, phases: Floats) -> tuple[Floats, float]:
        """Return the tokens of each group that are decoded after a phase, and the tokens of the samples that run at it,
        as a mean over groups; both summed over ``phases``, which ascend."""
        sums = np.append(0.0, phases.cumsum())
        full_PG, rest_PG, before_PG = self._full_PG, self._rest_PG, np.searchsorted(phases, self._rest_PG)
        after_PG = full_PG * (len(phases) * self.stop - sums[-1]) + before_PG * rest_PG - sums[before_PG]
        whole_PG = len(phases) * (full_PG - 1) / 2 + before_PG
        present_PG = full_PG * (self.stop * whole_PG + sums[-1]) + sums[before_PG]
        return after_PG.sum(axis=1), float(present_PG.sum() / len(present_PG))


def _timed(
    collected: list[float], round_s: float, num_untrained: int, training: float
) -> tuple[float, int, list[float]]:
    """Return the time from one round to the next in a steady state, how many batches of earlier rounds are untrained
    when a round begins, and when these and its own are published, counted from its beginning.
    """
    earlier: list[float] = []
    for _ in range(_ROUNDS_TO_SETTLE):
        published = list(earlier)
        for at in collected:
            published.append(max([at, *published[-1:]]) + training)
        gate = published[-1 - num_untrained] if len(published) > num_untrained else 0.0
        period = max(round_s, gate)
        num_earlier, earlier = len(earlier), [at - period for at in published if at > period]
    return period, num_earlier, published
