from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.integrate import quad

from rollover.errors import DataError
from rollover.workload.fit import _Data, _log_likelihood, fit, ks_distance
from rollover.workload.law import NORMAL, LengthLaw
from rollover.workload.source import PRESETS
from rollover.workload.trace import Trace, TracePrompt
from tests.workload.kit import LAW, drawn

KEYS = ("sigma", "icc", "loop_probability")


def errors_of(law: LengthLaw, trace: Trace) -> dict[str, float]:
    """By how many of its standard errors each parameter is off."""
    found = fit(trace)
    off = {key: (getattr(found.law, key) - getattr(law, key)) / found.standard_errors[key] for key in KEYS}
    off["median"] = math.log(found.law.median_tokens / law.median_tokens) / found.standard_errors["median_tokens"]
    assert found.follows
    return off


@pytest.mark.parametrize("name", ["r1-16k", "heavy-32k"])
def test_parameters_are_recovered_though_the_cap_hides_the_tail(name: str) -> None:
    off = errors_of(PRESETS[name], drawn(PRESETS[name], 500, seed=11))
    assert max(map(abs, off.values())) < 3.5
    assert sum(v**2 for v in off.values()) < 18.5  # chi-squared with 4 degrees of freedom, 99.9%


def test_prompts_have_the_mean_length_of_the_traces() -> None:
    trace = drawn(PRESETS["light-8k"], 50)
    long = tuple(replace(p, prompt_tokens=10_000 if i % 5 == 0 else 100) for i, p in enumerate(trace.prompts))
    assert fit(replace(trace, prompts=long)).law.prompt_tokens == 2080


def test_samples_cut_off_before_their_end_do_not_shorten_the_law() -> None:
    whole = drawn(LAW, 500, seed=5)
    rng = np.random.default_rng(0)
    cut = []
    for prompt in whole.prompts:
        limits = rng.exponential(4000, len(prompt.lengths)).astype(int) + 1
        open_ = frozenset(i for i, (n, limit) in enumerate(zip(prompt.lengths, limits, strict=True)) if limit < n)
        lengths = tuple(int(limits[i]) if i in open_ else n for i, n in enumerate(prompt.lengths))
        cut.append(replace(prompt, lengths=lengths, unfinished=open_))
    trace = replace(whole, prompts=tuple(cut))
    found = fit(trace)
    assert sum(len(p.unfinished) for p in trace.prompts) > 1000
    off = math.log(found.law.median_tokens / LAW.median_tokens) / found.standard_errors["median_tokens"]
    assert abs(off) < 3.5
    finished = np.array([n for p in trace.prompts for i, n in enumerate(p.lengths) if i not in p.unfinished])
    assert np.median(finished) < 0.8 * LAW.median_tokens


def test_responses_without_siblings_have_nothing_in_common() -> None:
    trace = drawn(LAW, 300, seed=5)
    alone = tuple(replace(prompt, lengths=prompt.lengths[:1]) for prompt in trace.prompts)
    found = fit(replace(trace, prompts=alone))
    assert found.law.icc == 0 and "icc" not in found.standard_errors


def test_the_likelihood_is_the_integral_over_the_prompts_effect() -> None:
    mu, sigma, icc, q, cap = 5.0, 0.7, 0.4, 0.1, 300
    prompts = ((120, 300, 250), (300, 300), (90,), (80, 200, 200), (60, 70))
    unfinished = (frozenset[int](), frozenset[int](), frozenset[int](), frozenset({1, 2}), frozenset({0, 1}))
    often = 5  # as many samples have to end by themselves
    found = tuple(
        TracePrompt(prompt_id=str(i), prompt_tokens=1, lengths=n, unfinished=u)
        for i, (n, u) in enumerate(often * [*zip(prompts, unfinished, strict=True)])
    )
    tau, s = math.sqrt(icc) * sigma, math.sqrt(1 - icc) * sigma

    def of_prompt(lengths: tuple[int, ...], cut: frozenset[int]) -> float:
        def density(z: float) -> float:
            product = NORMAL.pdf(z)
            for i, n in enumerate(lengths):
                if n == cap or i in cut:
                    product *= q + (1 - q) * (1 - NORMAL.cdf((math.log(n) - mu - tau * z) / s))
                else:
                    product *= (1 - q) * NORMAL.pdf((math.log(n + 0.5) - mu - tau * z) / s) / s
            return product

        return float(quad(density, -9, 9, epsabs=0, epsrel=1e-10)[0])

    exact = sum(math.log(of_prompt(n, u)) for n, u in zip(prompts, unfinished, strict=True))
    data = _Data.of(Trace(name="t", cap_tokens=cap, prompts=found))
    point = np.array([mu, math.log(sigma), math.log(icc / (1 - icc)), math.log(q / (1 - q))])
    assert _log_likelihood(data, point, drifts=False) == pytest.approx(often * exact, abs=1e-5)


def test_drift_is_found_where_there_is_some_and_only_there() -> None:
    found = fit(drawn(replace(LAW, drift_per_1k_prompts=0.5, icc=0.1, cap_tokens=40000), 500, seed=2))
    assert found.law.drift_per_1k_prompts == pytest.approx(0.5, abs=3.5 * found.standard_errors["drift_per_1k_prompts"])
    still = fit(drawn(PRESETS["light-8k"], 300, seed=2))
    assert still.law.drift_per_1k_prompts == 0.0


def test_the_distance_is_the_largest_gap_over_all_lengths() -> None:
    trace = drawn(LAW, 30, seed=4)
    lengths = np.array([n for p in trace.prompts for n in p.lengths])
    x = np.arange(LAW.cap_tokens + 1)
    shares = np.searchsorted(np.sort(lengths), x, side="right") / len(lengths)
    for law in (LAW, replace(LAW, loop_probability=0.3), replace(LAW, median_tokens=900)):
        assert ks_distance(trace, law) == pytest.approx(
            float(np.abs(shares - law.cdf(x.astype(float))).max()), abs=1e-12
        )


def test_a_trace_of_two_kinds_of_prompts_is_told_apart_from_the_law() -> None:
    short, long = drawn(replace(LAW, median_tokens=200, sigma=0.3), 200), drawn(replace(LAW, sigma=0.3), 200)
    renamed = tuple(replace(p, prompt_id=f"long-{p.prompt_id}") for p in long.prompts)
    found = fit(replace(short, prompts=short.prompts + renamed))
    assert found.ks > found.ks_p95
    assert not found.follows


def test_too_few_finished_samples_are_refused() -> None:
    prompts = tuple(TracePrompt(prompt_id=str(i), prompt_tokens=1, lengths=(9, 5 + i % 2)) for i in range(19))
    with pytest.raises(DataError, match="t: 19 of 38 responses ended by themselves below the cap of 9 tokens"):
        fit(Trace(name="t", cap_tokens=9, prompts=prompts))
