from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.environments.pass_at_k import ScoredPrompt, evaluate, pass_at_k


@given(n=st.integers(1, 8), data=st.data())
def test_pass_at_k_is_the_share_of_k_subsets_that_hold_a_solution(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1)])
def test_pass_at_k_refuses_what_it_cannot_estimate(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


def scored(source: str, number: int, *rewards: float, pass_score: float = 1.0) -> ScoredPrompt:
    solved = tuple(reward >= pass_score for reward in rewards)
    return ScoredPrompt(source=source, prompt_id=f"{source}/{number}@0", rewards=rewards, solved=solved)


def test_the_standard_error_counts_prompts_and_not_samples() -> None:
    few = [scored("a", 0, 1.0, 1.0), scored("a", 1, 0.0, 0.0), scored("a", 2, 1.0, 0.0)]
    many = [scored("a", p.prompt_id.count(""), *(p.rewards * 50)) for p in few]
    for prompts in (few, many):
        (row,) = evaluate(prompts, {"a": (1,)})
        assert row.pass_at[1].mean == pytest.approx(0.5)
        assert row.pass_at[1].standard_error == pytest.approx(statistics.stdev([1, 0, 0.5]) / math.sqrt(3))


def test_the_table_has_a_row_per_source_and_one_for_all() -> None:
    prompts = [
        scored("a", 0, 1.0, 0.2),
        *(scored("b", i, *rewards, pass_score=0.5) for i, rewards in enumerate([(0.5, 0.4), (0.0, 0.0)])),
    ]
    a, b, everything = evaluate(prompts, {"a": (1, 2), "b": (1, 2)})
    assert (a.source, a.num_prompts, a.num_samples) == ("a", 1, 2)
    assert (a.pass_at[1].mean, a.pass_at[2].mean, a.pass_at[1].standard_error) == (0.5, 1.0, None)
    assert (b.pass_at[1].mean, b.pass_at[2].mean) == (0.25, 0.5)
    assert b.reward.mean == pytest.approx(0.225)
    assert (everything.source, everything.num_prompts, everything.num_samples) == ("all", 3, 6)
    assert everything.pass_at[1].mean == pytest.approx(1 / 3)


def test_nothing_to_evaluate_is_an_error() -> None:
    with pytest.raises(ValueError, match="no prompt"):
        evaluate([], {})
    with pytest.raises(ValueError, match="a/0@0 has no scored sample"):
        evaluate([scored("a", 0)], {"a": (1,)})
