from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workload.kit import LAW, lengths_of, standard_error

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


def test_prompts_keep_their_difficulty_over_epochs_as_far_as_it_is_correlated() -> None:
    law = replace(LONG, icc=1.0, num_prompts=3000, epoch_correlation=0.9)
    workload = law.workload(4)
    zeroth, first, third = (np.log(lengths_of(workload, 3000, 1, first=3000 * e))[:, 0] for e in (0, 1, 3))
    assert np.corrcoef(zeroth, first)[0, 1] == pytest.approx(0.9, abs=0.02)
    assert np.corrcoef(zeroth, third)[0, 1] == pytest.approx(0.9**3, abs=0.03)
    assert third.std() == pytest.approx(law.sigma, rel=0.04)
    assert workload.prompt_id(3007) == "generated/7@1"


def test_a_dataset_smaller_than_a_block_begins_again_at_its_own_size() -> None:
    workload = replace(LONG, icc=1.0, num_prompts=3, epoch_correlation=1.0).workload(4)
    assert workload.group_lengths(1, 4) == workload.group_lengths(4, 4) == workload.group_lengths(301, 4)


def test_drift_lengthens_responses_by_its_rate() -> None:
    logs = np.log(lengths_of(replace(LONG, drift_per_1k_prompts=0.2).workload(2), 4000))
    still = np.log(lengths_of(LONG.workload(2), 4000))
    assert (logs - still)[3000].mean() == pytest.approx(0.6, abs=0.003)


def test_long_prompts_loop_more_often_and_the_share_of_loops_stays() -> None:
    law = replace(LAW, median_tokens=500, loop_probability=0.05)
    plain = lengths_of(law.workload(6), 6000) == law.cap_tokens
    hard = lengths_of(replace(law, loop_difficulty=0.8).workload(6), 6000) == law.cap_tokens
    assert abs(hard.mean() - plain.mean()) < 3.5 * standard_error(hard)
    medians = np.median(lengths_of(replace(law, loop_probability=0.0).workload(6), 6000), axis=1)
    slow = medians > np.median(medians)
    assert hard[slow].mean() > 2 * hard[~slow].mean()
    assert plain[slow].mean() < 1.3 * plain[~slow].mean()


def test_a_pareto_tail_keeps_the_ranks_of_all_samples() -> None:
    plain = lengths_of(LONG.workload(2), 500).ravel()
    heavy = lengths_of(replace(LONG, tail_exponent=1.5).workload(2), 500).ravel()
    by_plain = np.lexsort((heavy, plain))  # whole numbers tie in one of them and not in the other
    assert np.all(np.diff(heavy[by_plain]) >= 0)
    assert heavy.max() > 2 * plain.max()
