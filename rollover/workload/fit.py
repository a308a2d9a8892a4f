"""Fitting the length law to a trace by maximum likelihood.

A sample contributes the density of its log length where it ended by itself, and where it was cut (at the cap, or
before its end) the probability of being longer, ``q + (1 - q) P(no loop and longer)``: that tells loops from a long
tail. Siblings share the effect of their prompt, which is integrated out: exactly for the samples that ended (they are
jointly normal), by Gauss-Hermite quadrature around that for those cut. Drift is in the law only if it lowers Schwarz's
criterion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollover.errors import DataError
from rollover.workload.law import Floats, LengthLaw
from rollover.workload.trace import EmpiricalLaw, Trace

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(20)
_LOG_WEIGHTS = np.log(_WEIGHTS / math.sqrt(2 * math.pi))
_MIN_FINISHED = 20
"""Minimum number of samples that ended by themselves; fewer say nothing about a distribution."""
_RESAMPLES = 40
_LOG_SIGMA, _LOGIT_ICC, _LOGIT_Q = (-6.0, 1.6), (-9.0, 9.0), (-14.0, 7.0)
"""Bounds of the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A law, the standard errors of its parameters, and its distance from the trace."""

    law: LengthLaw
    standard_errors: dict[str, float]
    """Standard errors by parameter; the median's is relative."""
    ks: float
    """Kolmogorov-Smirnov distance between the trace and the law, including the mass at the cap."""
    ks_expected: float
    """Mean of that distance for traces of this shape drawn from the law itself."""
    ks_p95: float
    """Their 95th percentile: a trace beyond it does not come from this law."""

    @property
    def follows(self) -> bool:
        """Return True if the law explains the trace to within sampling error."""
        return self.ks <= self.ks_p95


def fit(trace: Trace, *, seed: int = 0) -> Fit:
    """Fit the law of a trace's lengths. Raises ``DataError`` if too few samples ended by themselves."""
    data = _Data.of(trace)
    best = min((_maximum(data, drifts=drifts) for drifts in (False, True)), key=lambda found: found.criterion)
    floor = int(min(n for p in trace.prompts for i, n in enumerate(p.lengths) if i not in p.unfinished))
    prompt_tokens = round(float(np.mean([p.prompt_tokens for p in trace.prompts])))
    law = replace(best.law, min_tokens=floor, prompt_tokens=prompt_tokens)
    expected = [ks_distance(_resampled(trace, law, seed + i), law) for i in range(_RESAMPLES)]
    return Fit(
        law=law,
        standard_errors=best.standard_errors(data),
        ks=ks_distance(trace, law),
        ks_expected=float(np.mean(expected)),
        ks_p95=float(np.quantile(expected, 0.95)),
    )


def ks_distance(trace: Trace, law: LengthLaw) -> float:
    """Return the largest gap between the trace's Kaplan-Meier estimate and the law."""
    lengths, finished, places = trace.columns()
    empirical = EmpiricalLaw.of(lengths, finished)
    mean_drift = law.drift_per_1k_prompts / 1000 * float(np.mean(places))
    drifted = replace(law, median_tokens=law.median_tokens * math.exp(mean_drift))
    model = drifted.cdf(empirical.values)
    before = drifted.cdf(empirical.values - 1)
    reached = np.concatenate([[0.0], empirical.cdf])
    return float(max(np.max(np.abs(reached[1:] - model)), np.max(np.abs(reached[:-1] - before))))


def _resampled(trace: Trace, law: LengthLaw, seed: int) -> Trace:
    """Return a trace of the same prompts and numbers of samples, drawn from the law."""
    drawn = law.workload(seed)
    prompts = tuple(
        replace(p, lengths=drawn.group_lengths(i, len(p.lengths)), unfinished=frozenset())
        for i, p in enumerate(trace.prompts)
    )
    return replace(trace, cap_tokens=law.cap_tokens, prompts=prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Data:
    """Samples in columns, in the order of their prompts; prompts are numbered in the order drawn."""

    log_ended: Floats
    ended_group: NDArray[np.int64]
    log_cut: Floats
    """Length at which the sample was cut: at the cap, or before its end."""
    cut_group: NDArray[np.int64]
    cap_tokens: int
    num_prompts: int

    @classmethod
    def of(cls, trace: Trace) -> _Data:
        lengths, finished, places = trace.columns()
        ended = finished & (lengths < trace.cap_tokens)
        if (num := int(ended.sum())) < _MIN_FINISHED:
            raise DataError(
                f"{trace.name}: {num} of {len(lengths)} responses ended by themselves below the cap of"
                f" {trace.cap_tokens} tokens; a fit needs at least {_MIN_FINISHED}"
            )
        return cls(
            log_ended=np.log(lengths[ended] + 0.5),  # int() cut off half a token on average
            ended_group=places[ended],
            log_cut=np.log(lengths[~ended]),
            cut_group=places[~ended],
            cap_tokens=trace.cap_tokens,
            num_prompts=len(trace.prompts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maximum:
    """The point where the likelihood is greatest, with or without drift."""

    point: Floats
    drifts: bool
    law: LengthLaw
    criterion: float
    """Schwarz's: parameters are paid for by the logarithm of the number of prompts."""

    def standard_errors(self, data: _Data) -> dict[str, float]:
        """Estimate the standard errors from the curvature at the maximum; parameters at a bound have none."""
        names = ["median_tokens", "sigma", "icc", "loop_probability"]
        names += ["drift_per_1k_prompts"] * self.drifts
        icc, q = self.law.icc, self.law.loop_probability
        slopes = [1.0, self.law.sigma, icc * (1 - icc), q * (1 - q), 1.0]
        bounds = _bounds(drifts=self.drifts)
        inside = [i for i, (low, high) in enumerate(bounds) if low + 1e-3 < self.point[i] < high - 1e-3]
        hessian = _hessian(lambda p: -_log_likelihood(data, p, drifts=self.drifts), self.point, inside, 1e-3)
        variances = np.diag(np.linalg.pinv(hessian))
        return {names[i]: slopes[i] * math.sqrt(v) for i, v in zip(inside, variances.tolist(), strict=True) if v > 0}


def _bounds(*, drifts: bool) -> list[tuple[float, float]]:
    return [(0.0, 17.0), _LOG_SIGMA, _LOGIT_ICC, _LOGIT_Q] + [(-1.0, 1.0)] * drifts


def _maximum(data: _Data, *, drifts: bool) -> _Maximum:
    from scipy.optimize import minimize

    y = data.log_ended
    share_cut = len(data.log_cut) / (len(data.log_cut) + len(y))
    alone = data.num_prompts == len(data.log_cut) + len(y)  # without siblings every icc is as likely: it is taken as 0
    start = [float(np.median(y)), math.log(max(float(np.std(y)), 0.01)), _LOGIT_ICC[0] if alone else 0.0]
    loops = max(share_cut / 2, 1e-3)
    start += [math.log(loops / (1 - loops))]
    start += [0.0] * drifts
    found: Any = minimize(
        lambda p: -_log_likelihood(data, p, drifts=drifts) / len(y),
        start,
        bounds=_bounds(drifts=drifts),
        method="L-BFGS-B",
    )
    best = -float(found.fun) * len(y)
    return _Maximum(
        point=found.x,
        drifts=drifts,
        law=_law(found.x, data.cap_tokens),
        criterion=len(start) * math.log(data.num_prompts) - 2 * best,
    )


def _law(point: Floats, cap_tokens: int) -> LengthLaw:
    mu, log_sigma, logit_icc, logit_q, *drift = (float(v) for v in point)
    return LengthLaw(
        median_tokens=math.exp(mu),
        sigma=math.exp(log_sigma),
        icc=_logistic(logit_icc) if logit_icc > _LOGIT_ICC[0] + 1e-3 else 0.0,
        loop_probability=_logistic(logit_q) if logit_q > _LOGIT_Q[0] + 1 else 0.0,
        cap_tokens=cap_tokens,
        drift_per_1k_prompts=drift[0] if drift else 0.0,
    )


def _log_likelihood(data: _Data, point: Floats, *, drifts: bool) -> float:
    """Sum the log-likelihood over all samples, with the prompt effects integrated out."""
    from scipy.special import log_ndtr, logsumexp

    mu, sigma, icc, q = float(point[0]), math.exp(point[1]), _logistic(point[2]), _logistic(point[3])
    drift = float(point[4]) / 1000 if drifts else 0.0
    ended = data.log_ended - mu - drift * data.ended_group
    cut = data.log_cut - mu - drift * data.cut_group
    within, between = (1 - icc) * sigma**2, icc * sigma**2  # variances

    # Samples that ended: jointly normal with equal correlation.
    n = np.bincount(data.ended_group, minlength=data.num_prompts)
    sums = np.bincount(data.ended_group, weights=ended, minlength=data.num_prompts)
    total = within + n * between
    log_density = -0.5 * (len(ended) * math.log(2 * math.pi * within) + float(np.sum(np.log(total / within))))
    log_density -= 0.5 * float(np.sum(ended**2) - np.sum(sums**2 * between / total)) / within
    log_density += len(ended) * math.log1p(-q)
    if not len(cut):
        return log_density

    # Samples that were cut, given the prompt's effect as those that ended leave it.
    prompts, place = np.unique(data.cut_group, return_inverse=True)
    mean = (between * sums / total)[prompts]
    spread = np.sqrt(between * within / total)[prompts]
    effect = mean[:, None] + spread[:, None] * _NODES
    log_longer = log_ndtr((effect[place] - cut[:, None]) / math.sqrt(within))
    log_cut = np.logaddexp(math.log(q), math.log1p(-q) + log_longer)
    per_prompt = np.add.reduceat(log_cut, np.flatnonzero(np.diff(place, prepend=-1)), axis=0)
    return log_density + float(np.sum(logsumexp(per_prompt + _LOG_WEIGHTS, axis=1)))


def _hessian(function: Any, point: Floats, inside: list[int], step: float) -> Floats:
    """Return the second differences over the coordinates ``inside``."""

    def at(*moves: tuple[int, float]) -> float:
        moved = point.copy()
        for i, by in moves:
            moved[i] += by
        return float(function(moved))

    hessian = np.empty((len(inside), len(inside)))
    for a, i in enumerate(inside):
        for b, j in enumerate(inside[: a + 1]):
            corners = at((i, step), (j, step)) - at((i, step), (j, -step))
            corners -= at((i, -step), (j, step)) - at((i, -step), (j, -step))
            hessian[a, b] = hessian[b, a] = corners / (4 * step**2)
    return hessian


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))
