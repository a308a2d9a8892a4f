from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.tasks.open import MixtureSource
from rollover.types import Prompt


class Numbers:
    """Prompt i of source s is called ``s/i``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reward_specs = (SimpleNamespace(source=name),)

    def prompt(self, index: int) -> Prompt:
        return Prompt(prompt_id=f"{self.name}/{index}", token_ids=(1,), text="", source=self.name)

    def solution(self, prompt: Prompt) -> str:
        return f"{self.name} solves {prompt.prompt_id}"


def mixed(*weights: float) -> MixtureSource:
    return MixtureSource([Numbers(str(k)) for k in range(len(weights))], weights)


def drawn(weights: Sequence[float], num: int) -> list[str]:
    mixture = mixed(*weights)
    return [mixture.prompt(i).prompt_id for i in range(num)]


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(1, 40))
def test_every_source_is_drawn_in_order_without_gap_or_repeat(weights: list[int], num: int) -> None:
    seen: Counter[str] = Counter()
    for prompt_id in drawn(weights, num):
        source, number = prompt_id.split("/")
        assert int(number) == seen[source]
        seen[source] += 1


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4))
def test_each_cycle_holds_exactly_the_shares_and_any_stretch_nearly(weights: list[int]) -> None:
    total = sum(weights)
    sources = [int(p.split("/")[0]) for p in drawn(weights, 3 * total)]
    for start in range(0, 3 * total, total):
        assert Counter(sources[start : start + total]) == dict(enumerate(weights))
    for end in range(3 * total):
        for k, weight in enumerate(weights):
            assert abs(sources[:end].count(k) - end * weight / total) < len(weights)


@pytest.mark.parametrize(
    ("weights", "cycle"), [([0.7, 0.2, 0.1], 10), ([1.0, 1.0, 1.0], 3), ([2.0, 1.0], 3), ([0.5, 1.0], 3)]
)
def test_the_cycle_is_as_short_as_the_weights_allow(weights: list[float], cycle: int) -> None:
    assert mixed(*weights).cycle == cycle


def test_draws_are_spread_evenly_over_the_cycle() -> None:
    assert [p[0] for p in drawn([2.0, 1.0], 6)] == list("010010")
    assert [p[0] for p in drawn([1.0, 5.0], 6)] == list("110111")


def test_crooked_weights_are_rounded_and_every_source_is_still_drawn() -> None:
    mixture = mixed(1.0, 1e-7)
    assert Counter(mixture.prompt(i).source for i in range(mixture.cycle)) == {"0": 10_000, "1": 1}


def test_a_prompt_is_solved_by_the_source_that_it_came_from() -> None:
    mixture = mixed(1.0, 1.0)
    assert {mixture.solution(mixture.prompt(i)) for i in range(2)} == {"0 solves 0/0", "1 solves 1/0"}
