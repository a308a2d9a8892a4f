from __future__ import annotations

import json
import re
from typing import Any

import pytest

from rollover.environments.reasoning_gym import GymDataset, freeze, thaw
from rollover.environments.rewards.extraction import extract_answer
from rollover.errors import DataError
from rollover.tasks.sources.reasoning_gym import worked_solution

LINE = re.compile(r"(-?\d+) ([-+*%]) (-?\d+) = (-?\d+)")
CASES = [
    ("chain_sum", {"min_terms": 2, "max_terms": 20, "min_digits": 1, "max_digits": 1}),
    ("chain_sum", {"min_terms": 1, "max_terms": 6, "min_digits": 1, "max_digits": 4, "allow_negation": True}),
    ("products", {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 4}),
    ("products", {"min_terms": 1, "max_terms": 3, "min_digits": 1, "max_digits": 3, "allow_negation": True}),
    ("gcd", {"min_numbers": 2, "max_numbers": 5, "max_value": 200}),
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


@each_case
def test_an_entry_that_went_through_the_journal_has_the_same_solution(name: str, config: dict[str, Any]) -> None:
    dataset = GymDataset(name, config, seed=14)
    for row in range(20):
        entry = dataset.entry(row)
        assert worked_solution(name, thaw(json.loads(json.dumps(freeze(entry))))) == worked_solution(name, entry)


def test_a_chain_sum_takes_the_terms_in_order_and_goes_on_from_each_result() -> None:
    entry = {"metadata": {"expression": "7 - 9 + 4 - 0"}}
    assert worked_solution("chain_sum", entry) == "7 - 9 = -2\n-2 + 4 = 2\n2 - 0 = 2\n#### 2"
    dataset = GymDataset("chain_sum", CASES[0][1], seed=15)
    for row in range(100):
        entry = dataset.entry(row)
        steps = lines_of("chain_sum", entry)
        assert len(steps) == entry["metadata"]["num_terms"] - 1
        assert [a for a, *_ in steps[1:]] == [c for *_, c in steps[:-1]]
        first = steps[0][0]
        assert " ".join([str(first), *(f"{op} {b}" for _, op, b, _ in steps)]) == entry["metadata"]["expression"]


def test_a_product_is_taken_one_digit_at_a_time() -> None:
    def solve(expression: str) -> str:
        return worked_solution("products", {"metadata": {"expression": expression}})

    assert solve("12 * 34") == "12 * 30 = 360\n12 * 4 = 48\n360 + 48 = 408\n#### 408"
    assert solve("7 * -305") == "7 * -300 = -2100\n7 * -5 = -35\n-2100 + -35 = -2135\n#### -2135"
    assert solve("9 * 0 * 4") == "9 * 0 = 0\n0 * 4 = 0\n#### 0"


def test_a_greatest_common_divisor_ends_at_the_first_remainder_of_zero() -> None:
    def solve(*numbers: int) -> str:
        return worked_solution("gcd", {"metadata": {"numbers": list(numbers)}})

    assert solve(24, 36) == "36 % 24 = 12\n24 % 12 = 0\n#### 12"
    assert solve(7, 7) == "7 % 7 = 0\n#### 7"
    assert solve(12, 18, 4) == "18 % 12 = 6\n12 % 6 = 0\n6 % 4 = 2\n4 % 2 = 0\n#### 2"


def test_an_unknown_dataset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"'chainsum' has no worked solutions .*; known: chain_sum, gcd, products"):
        worked_solution("chainsum", {})
