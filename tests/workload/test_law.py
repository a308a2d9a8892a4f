from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.workload.law import LengthLaw
from rollover.workload.source import PRESETS
from tests.workload.kit import LAW, lengths_of, standard_error

SIMULATED = {
    "r1-16k": (6275, 15956, 16384, 16384, 0.096),
    "qwen3-16k": (8091, 16215, 16384, 16384, 0.098),
    "heavy-32k": (7235, 18681, 31118, 32768, 0.047),
    "light-8k": (1453, 2618, 3276, 5246, 0.003),
}
"""Mean, p90, p95, p99 and truncated share of 48,000 draws, of 6,000 prompts, made elsewhere. For r1-16k all of them
lie 1.5 standard errors above what the parameters imply: mean 6202, p90 15563, 9.2% truncated."""


@pytest.mark.parametrize("median", [4, 5, 500, 1000, 3000, 2**23])
def test_a_constant_length_is_the_median(median: int) -> None:
    law = replace(LAW, median_tokens=median, sigma=0.0, loop_probability=0.0, min_tokens=1, cap_tokens=2**24)
    law = replace(law, drift_per_1k_prompts=0.0)
    assert law.workload(0).group_lengths(3, 2) == (median, median) and law.quantile(0.5) == median


@pytest.mark.parametrize("name", SIMULATED)
def test_presets_have_the_statistics_of_an_independent_simulation(name: str) -> None:
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


@pytest.mark.parametrize("law", [*PRESETS.values(), replace(LAW, cap_tokens=900)])
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"median_tokens": 0.0}, "median_tokens must be at least 1, got 0.0"),
        ({"median_tokens": float("nan")}, "median_tokens must be at least 1, got nan"),
        ({"sigma": -0.1}, r"sigma must be in \[0, 5\]"),
        ({"icc": 1.1}, r"icc must be in \[0, 1\], got 1.1"),
        ({"loop_probability": -0.1}, r"loop_probability must be in \[0, 1\], got -0.1"),
        ({"cap_tokens": 0}, "cap_tokens must be at least 1, got 0"),
        ({"cap_tokens": 2**62}, f"cap_tokens must be at most 16777216, got {2**62}"),
        ({"prompt_tokens": 2**24 + 1}, "prompt_tokens must be at most 16777216, got 16777217"),
        ({"min_tokens": 9000}, r"min_tokens \(9000\) must not be above cap_tokens \(8192\)"),
        ({"drift_per_1k_prompts": 3.0}, r"drift_per_1k_prompts must be in \[-1, 1\], got 3.0"),
    ],
)
def test_impossible_parameters_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LAW, **change)


# --- Draws from a law ---

LONG = replace(LAW, cap_tokens=10**7, min_tokens=1, loop_probability=0.0)
"""Nothing is cut, so that log lengths are normal."""
questions = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=12, unique=True
)


@given(questions, st.randoms(use_true_random=False))
def test_lengths_do_not_depend_on_what_else_was_asked(asked: list[tuple[int, int, int]], random: object) -> None:
    first, second = LAW.workload(5), LAW.workload(5)
    answers = {q: first.group_lengths(*q) for q in asked}
    random.shuffle(asked)  # type: ignore[attr-defined]
    for q in asked:
        assert second.group_lengths(*q) == answers[q]


@given(st.integers(0, 1000), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2))
def test_a_larger_group_has_the_samples_of_a_smaller_one_first(i: int, small: int, more: int, attempt: int) -> None:
    workload = LAW.workload(5)
    large = workload.group_lengths(i, small + more, attempt)
    assert len(large) == small + more
    assert large[:small] == workload.group_lengths(i, small, attempt)
    assert all(LAW.min_tokens <= n <= LAW.cap_tokens for n in large)


def test_a_workload_in_another_process_gives_the_same_lengths() -> None:
    workload = LAW.workload(9)
    workload.group_lengths(0, 8)
    copy = pickle.loads(pickle.dumps(workload))
    assert np.array_equal(lengths_of(copy, 300), lengths_of(workload, 300))


def test_seeds_differ() -> None:
    assert not np.array_equal(lengths_of(LAW.workload(1), 10), lengths_of(LAW.workload(2), 10))
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        LAW.workload(-1)


@pytest.mark.parametrize("icc", [0.0, 0.5, 0.8])
def test_siblings_share_icc_of_the_variance(icc: float) -> None:
    logs = np.log(lengths_of(replace(LONG, icc=icc).workload(2), 6000, 2))
    assert np.corrcoef(logs.T)[0, 1] == pytest.approx(icc, abs=0.03)
    assert logs.std() == pytest.approx(LONG.sigma, rel=0.02)


def test_a_prompt_drawn_again_has_new_samples_of_the_same_prompt() -> None:
    workload = LONG.workload(2)
    first = np.log(lengths_of(workload, 4000, 1))[:, 0]
    again = np.log([workload.group_lengths(i, 1, attempt=1)[0] for i in range(4000)])
    assert np.corrcoef(first, again)[0, 1] == pytest.approx(LONG.icc, abs=0.04)
    assert workload.prompt_id(7) == "generated/7@0"


def test_drift_lengthens_responses_by_its_rate() -> None:
    logs = np.log(lengths_of(replace(LONG, drift_per_1k_prompts=0.2).workload(2), 4000))
    still = np.log(lengths_of(LONG.workload(2), 4000))
    assert (logs - still)[3000].mean() == pytest.approx(0.6, abs=0.003)
