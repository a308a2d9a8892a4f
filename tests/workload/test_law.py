from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.workload.law import LengthLaw
from rollover.workload.presets import PRESETS
from tests.workload.kit import LAW, lengths_of, standard_error

SIMULATED = {
    "r1-16k": (6275, 15956, 16384, 16384, 0.096),
    "qwen3-16k": (8091, 16215, 16384, 16384, 0.098),
    "heavy-32k": (7235, 18681, 31118, 32768, 0.047),
    "light-8k": (1453, 2618, 3276, 5246, 0.003),
}
"""Mean, p90, p95, p99 and truncated share of 48,000 draws, of 6,000 prompts, made elsewhere. For r1-16k all of them
lie 1.5 standard errors above what the parameters imply: mean 6202, p90 15563, 9.2% truncated."""


@pytest.mark.parametrize("name", SIMULATED)
def test_presets_have_the_statistics_of_a_simulation_made_elsewhere_within_its_sampling_error(name: str) -> None:
    law = PRESETS[name]
    sample = lengths_of(law.workload(7), 6000)
    for found, exact, values in (
        (SIMULATED[name][0], law.mean_tokens, sample),
        (SIMULATED[name][4], law.truncated, sample == law.cap_tokens),
    ):
        digits = 0.5 * 10.0 ** -(3 if exact < 1 else 0)
        assert abs(found - exact) < 2.5 * standard_error(values) + digits
    for quantile, p in zip(SIMULATED[name][1:4], (0.9, 0.95, 0.99), strict=True):
        # The share of samples up to the quantile found elsewhere is p, as far as 6,000 prompts tell.
        reached = float(law.cdf(np.array([quantile], float))[0])
        below = float(law.cdf(np.array([quantile - 1], float))[0])
        error = 2.5 * standard_error(sample <= min(quantile, law.cap_tokens - 1))
        assert below - error < p < reached + error


@pytest.mark.parametrize("law", [*PRESETS.values(), replace(LAW, tail_exponent=1.6), replace(LAW, cap_tokens=900)])
def test_draws_have_the_closed_form_distribution(law: LengthLaw) -> None:
    sample = lengths_of(law.workload(3), 4000)
    assert abs(sample.mean() - law.mean_tokens) < 3.5 * standard_error(sample)
    for p in (0.1, 0.5, 0.8, 0.93):
        x = law.quantile(p)
        share = float(law.cdf(np.array([x], float))[0])
        assert abs((sample <= x).mean() - share) < 3.5 * standard_error(sample <= x) + 1e-9


laws = st.builds(
    LengthLaw,
    median_tokens=st.floats(2, 20000),
    sigma=st.floats(0.05, 2),
    icc=st.floats(0, 1),
    loop_probability=st.floats(0, 1),
    cap_tokens=st.integers(50, 40000),
    min_tokens=st.integers(1, 50),
    tail_exponent=st.none() | st.floats(0.5, 4),
)


@given(laws, st.floats(0.001, 0.999))
def test_quantiles_invert_the_distribution_function(law: LengthLaw, p: float) -> None:
    x = law.quantile(p)
    assert law.min_tokens <= x <= law.cap_tokens
    assert law.cdf(np.array([x], float))[0] >= p - 1e-9
    assert law.cdf(np.array([x - 1], float))[0] <= p + 1e-9


@given(laws)
def test_the_mean_is_the_sum_over_all_lengths(law: LengthLaw) -> None:
    x = np.arange(law.cap_tokens + 1, dtype=float)
    probabilities = np.diff(law.cdf(x), prepend=0.0)
    assert probabilities.min() >= -1e-12
    assert law.mean_tokens == pytest.approx(float(probabilities @ x))
    assert law.truncated == pytest.approx(float(probabilities[-1]), abs=1e-12)


def test_a_pareto_tail_begins_at_the_90th_percentile_and_has_its_exponent() -> None:
    bare = LengthLaw(median_tokens=1000, sigma=0.5, icc=0.5, loop_probability=0, cap_tokens=2**24)
    law = replace(bare, tail_exponent=1.5)
    assert law.quantile(0.9) == bare.quantile(0.9)
    assert law.quantile(0.5) == bare.quantile(0.5)
    x = np.array([law.quantile(0.95), 10.0 * law.quantile(0.95)])
    shorter, longer = 1 - law.cdf(x)
    assert shorter / longer == pytest.approx(10**1.5, rel=0.002)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"median_tokens": 0.0}, "median_tokens must be at least 1, got 0.0"),
        ({"median_tokens": float("nan")}, "median_tokens must be at least 1, got nan"),
        ({"sigma": -0.1}, r"sigma must lie in \[0, 5\]"),
        ({"icc": 1.1}, r"icc must lie in \[0, 1\], got 1.1"),
        ({"loop_probability": -0.1}, r"loop_probability must lie in \[0, 1\], got -0.1"),
        ({"cap_tokens": 0}, "cap_tokens must be at least 1, got 0"),
        ({"cap_tokens": 2**62}, f"cap_tokens must be at most 16777216, got {2**62}"),
        ({"prompt_tokens": 2**24 + 1}, "prompt_tokens must be at most 16777216, got 16777217"),
        ({"min_tokens": 9000}, r"min_tokens \(9000\) must not be above cap_tokens \(8192\)"),
        ({"num_prompts": 0}, "num_prompts must be at least 1, got 0"),
        ({"tail_exponent": 0.0}, "tail_exponent must be above 0, got 0.0"),
        ({"drift_per_1k_prompts": 3.0}, r"drift_per_1k_prompts must lie in \[-1, 1\], got 3.0"),
        ({"epoch_correlation": 1.2}, r"epoch_correlation must lie in \[-1, 1\], got 1.2"),
        ({"loop_difficulty": -1.0}, r"loop_difficulty must lie in \[0, 2\], got -1.0"),
    ],
)
def test_impossible_parameters_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LAW, **change)
