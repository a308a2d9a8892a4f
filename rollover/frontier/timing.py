"""Measures how long an iteration takes, from segments of a run: c0 and B0 from when each began and ended and what ran
meanwhile.

A segment of n tokens took n iterations of ``c0 (1 + B / B0)``, B changing under it. So the integral of
``1 / (1 + B(t) / B0)`` over its time is ``c0 n``, and for the first segment of a generation call more by what came
before its first token: linear in all but B0, which is searched for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollover.workload.law import Floats

_LEAST_EXPLAINED = 0.01
"""Fraction of the segments' time that iterations must account for, so that they can be timed."""
_LOG_B0 = np.linspace(math.log(0.5), math.log(1e5), 80)
"""Logarithms of the values searched for B0, in samples; at the upper end iterations do not slow down at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """One entry per segment, and the number of running samples over time.

    Example: ``Segments.of([(0.0, 1.0, 50, True)], [(0.0, 1)], 1.0)`` is one call that took 1 s for 50 tokens, alone;
    its ``full_speed_s(1.0)`` is 0.5.
    """

    start_s: Floats
    end_s: Floats
    tokens: Floats
    begins: Floats
    """1 for a segment that begins a generation call, else 0."""
    times_s: Floats
    running: Floats
    """Number of running samples from each of ``times_s`` on."""

    @classmethod
    def of(
        cls, rows: Sequence[tuple[float, float, int, bool]], active: Sequence[tuple[float, int]], end_s: float
    ) -> Segments:
        """Turn rows into arrays. ``rows``: start, end, tokens, whether a generation call begins with it; ``active``:
        (time, running samples from then on)."""
        start, end, tokens, begins = (np.array(column, float) for column in zip(*rows, strict=True))
        times, running = (np.array(column, float) for column in zip(*active, strict=True))
        last = max(end_s, float(end.max()), float(times[-1]))
        return cls(
            start_s=start, end_s=end, tokens=tokens, begins=begins, times_s=np.append(times, last), running=running
        )

    def full_speed_s(self, b0: float) -> Floats:
        """Return the seconds that each segment would have taken if iterations did not slow down with the batch."""
        speed = 1 / (1 + self.running / b0)
        reached = np.concatenate([[0.0], np.cumsum(speed * np.diff(self.times_s))])
        ended = np.interp(self.end_s, self.times_s, reached)
        return np.asarray(ended - np.interp(self.start_s, self.times_s, reached), np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationFit:
    """The iteration time ``c0_s (1 + B / b0)`` that explains the segments best.

    Example: with ``c0_s=0.01, b0=64.0`` an iteration over 64 samples takes 20 ms.
    """

    c0_s: float
    b0: float
    """Infinite if iterations do not slow down with the batch."""
    start_s: float
    """Seconds until a call's first token besides its iterations: the prefill of all calls that start with it."""
    error: float
    """Mean relative error of the segments' times, weighted by tokens."""


def fit_iterations(segments: Segments) -> IterationFit | None:
    """Fit by least squares of the relative errors, weighted by tokens; return ``None`` where times do not grow with
    tokens."""
    from scipy.optimize import minimize_scalar

    losses = [_loss(segments, x) for x in _LOG_B0]
    place = int(np.argmin(losses))
    around = (float(_LOG_B0[max(0, place - 1)]), float(_LOG_B0[min(len(_LOG_B0) - 1, place + 1)]))
    b0 = math.exp(minimize_scalar(lambda x: _loss(segments, x), bounds=around, method="bounded").x)
    found, _ = _fitted(segments, b0)
    full_speed_s = segments.full_speed_s(b0)
    if found.c0_s * segments.tokens.sum() < _LEAST_EXPLAINED * full_speed_s.sum():
        return None
    begun = segments.begins > 0
    slowed = float(np.mean(((segments.end_s - segments.start_s) / full_speed_s)[begun])) if begun.any() else 1.0
    return replace(found, b0=b0 if place < len(_LOG_B0) - 1 else math.inf, start_s=found.start_s * slowed)


def _loss(segments: Segments, log_b0: float) -> float:
    return _fitted(segments, math.exp(log_b0))[1]


def _fitted(segments: Segments, b0: float) -> tuple[IterationFit, float]:
    """Return the best c0 and start for a B0, and their loss: ``full_speed_s = start_s begins + c0_s tokens``, neither
    below 0. The start is the start of a call that nothing slows down."""
    from scipy.optimize import nnls

    seconds = segments.full_speed_s(b0)
    weights = np.sqrt(segments.tokens) / seconds
    design = np.stack([segments.begins, segments.tokens], axis=1)
    (start_s, c0_s), residual = nnls(design * weights[:, None], seconds * weights)
    errors = np.abs(design @ np.array([start_s, c0_s]) / seconds - 1)
    error = float(np.average(errors, weights=segments.tokens))
    return IterationFit(c0_s=float(c0_s), b0=b0, start_s=float(start_s), error=error), float(residual)
