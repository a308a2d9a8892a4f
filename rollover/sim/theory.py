"""Computes the cost of a step and the lag of its tokens in closed form. ``docs/theory.md`` derives it.

A decode iteration over B samples takes ``c0 (1 + B / B0)``, and the batch sizes of a step's iterations add up to the
tokens it decodes. In a steady state without waste those are the X tokens it trains, so that

    T = c0 (K + X / B0) + P

for K iterations and P seconds of prefill: all that a scheduler can change is K and P. What it pays is lag. A token
waits for the end of its sample, then for the longest sibling; where samples decode without pause and group ends fall
evenly between weight updates, the wait divided by K is the token's mean staleness. So ``lag K = kappa``, a constant of
the length law: throughput and lag lie on one curve, and schedulers choose a point of it.

All times here are in units of c0, an iteration over an empty batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """One training step: its batch, its engine and the spread of its lengths.

    Example: ``StepModel.of_lengths([[1, 3]], batch_size=1, b0=4.0)`` has ``sync_iterations`` 3.0 and ``kappa`` 1.75.
    """

    batch_size: int
    """N: number of groups that a step trains."""
    group_size: int
    """G: samples per group."""
    mean_tokens: float
    """E[L]."""
    sync_iterations: float
    """Iterations when a step decodes its own N groups from start to end: the mean of the longest of N G samples."""
    kappa_own: float
    """Iterations a token waits for the end of its own sample, mean over tokens."""
    kappa_sibling: float
    """Iterations it then waits for the longest sibling."""
    b0: float
    """Samples at which an iteration takes twice as long as over an empty batch."""

    @classmethod
    def of_lengths(cls, lengths_PG: ArrayLike, *, batch_size: int, b0: float) -> Self:
        """Estimate the model from a sample of response lengths, one row per group."""
        lengths = np.asarray(lengths_PG, dtype=np.float64)
        return cls(
            batch_size=batch_size,
            group_size=lengths.shape[1],
            mean_tokens=float(lengths.mean()),
            sync_iterations=expected_longest(lengths.max(axis=1), batch_size),
            kappa_own=own_wait(lengths),
            kappa_sibling=sibling_wait(lengths),
            b0=b0,
        )

    @property
    def tokens(self) -> float:
        """Return X = N G E[L]: the tokens that a step trains."""
        return self.batch_size * self.group_size * self.mean_tokens

    @property
    def kappa(self) -> float:
        """Return the token lag times K, with whole groups consumed."""
        return self.kappa_own + self.kappa_sibling

    def step_time(self, iterations: float) -> float:
        """Return T / c0 of a step of K ``iterations`` without prefill."""
        return iterations + self.tokens / self.b0

    def gain(self, iterations: float) -> float:
        """Return the throughput relative to synchronous rollout."""
        return self.step_time(self.sync_iterations) / self.step_time(iterations)

    @property
    def ceiling(self) -> float:
        """Return the gain at K = 0, which no scheduler exceeds."""
        return self.gain(0.0)

    def gain_at_lag(self, lag: float, *, whole_groups: bool = True) -> float:
        """Return the gain that a mean token staleness of ``lag`` versions pays for: a point of the curve. It holds
        where the wait spreads over more than one step, that is above a lag of about 1. Without ``whole_groups`` a
        sample is consumed when it ends, without waiting for its siblings."""
        return self.gain((self.kappa if whole_groups else self.kappa_own) / lag)


def expected_longest(lengths: ArrayLike, count: int) -> float:
    """Return the mean of the longest of ``count`` independent draws from the empirical law of ``lengths``: the sum of
    ``1 - F(x)^count`` over x."""
    values, counts = np.unique(np.asarray(lengths, dtype=np.float64), return_counts=True)
    below = np.cumsum(counts) / counts.sum()
    return float(values[0] + np.sum((1 - below[:-1] ** count) * np.diff(values)))


def own_wait(lengths_PG: NDArray[np.float64]) -> float:
    """Return E[L^2] / 2 E[L]: the token at position j waits for L - j more of its sample."""
    return float(np.sum(lengths_PG**2) / (2 * np.sum(lengths_PG)))


def sibling_wait(lengths_PG: NDArray[np.float64]) -> float:
    """Return E[sum of L_i (M - L_i)] / E[sum of L_i], where M is the longest of the group: siblings start together, and
    all L_i tokens of a sample wait M - L_i."""
    longest_P1 = lengths_PG.max(axis=1, keepdims=True)
    return float(np.sum(lengths_PG * (longest_P1 - lengths_PG)) / np.sum(lengths_PG))
