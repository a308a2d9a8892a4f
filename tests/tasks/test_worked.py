from __future__ import annotations

import re
from typing import Any

import pytest

from rollover.environments.reasoning_gym import GymDataset
from rollover.environments.rewards.extraction import extract_answer
from rollover.errors import DataError
from rollover.tasks.sources.reasoning_gym import worked_solution

LINE = re.compile(r"(-?\d+) ([-+*%]) (-?\d+) = (-?\d+)")
CASES = [
    ("chain_sum", {"min_terms": 2, "max_terms": 20, "min_digits": 1, "max_digits": 1}),
    ("chain_sum", {"min_terms": 1, "max_terms": 6, "min_digits": 1, "max_digits": 4, "allow_negation": True}),
]
ITEMS = 400

each_case = pytest.mark.parametrize(("name", "config"), CASES)


def lines_of(name: str, entry: dict[str, Any]) -> list[tuple[int, str, int, int]]:
    """(a, op, b, c) of every line before the last; fails where a line has another form."""
    steps = []
    for line in worked_solution(name, entry).split("\n")[:-1]:
        match = LINE.fullmatch(line)
        assert match, line
        a, op, b, c = match.groups()
        steps.append((int(a), op, int(b), int(c)))
    return steps


@each_case
def test_the_last_line_is_right_by_the_library_s_own_verifier(name: str, config: dict[str, Any]) -> None:
    dataset = GymDataset(name, config, seed=11)
    for row in range(ITEMS):
        entry = dataset.entry(row)
        last = worked_solution(name, entry).rsplit("\n", 1)[-1]
        assert last.startswith("#### ")
        assert dataset.score(last.removeprefix("#### "), entry) == 1.0, (entry["question"], last)
        assert extract_answer(worked_solution(name, entry), "hashes") == last.removeprefix("#### ")


@each_case
def test_every_line_is_true(name: str, config: dict[str, Any]) -> None:
    dataset = GymDataset(name, config, seed=12)
    true = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "%": int.__mod__}
    for row in range(ITEMS):
        for a, op, b, c in lines_of(name, dataset.entry(row)):
            assert true[op](a, b) == c


@each_case
def test_the_answer_comes_from_the_question_and_not_from_the_item_s_answer(name: str, config: dict[str, Any]) -> None:
    entry = GymDataset(name, config, seed=13).entry(0)
    assert worked_solution(name, {**entry, "answer": "nothing"}) == worked_solution(name, entry)


def test_a_chain_sum_takes_the_terms_in_order_and_goes_on_from_each_result() -> None:
    dataset = GymDataset("chain_sum", CASES[0][1], seed=15)
    for row in range(100):
        entry = dataset.entry(row)
        steps = lines_of("chain_sum", entry)
        assert len(steps) == entry["metadata"]["num_terms"] - 1
        assert [a for a, *_ in steps[1:]] == [c for *_, c in steps[:-1]]
        first = steps[0][0]
        assert " ".join([str(first), *(f"{op} {b}" for _, op, b, _ in steps)]) == entry["metadata"]["expression"]


def test_an_unknown_dataset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"'chainsum' has no worked solutions .*; only 'chain_sum' has"):
        worked_solution("chainsum", {})
