"""Responses with known truth, judged by ``math_verify``'s reward and by the library alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import math_verify
import pytest

from rollover.environments.rewards import MathVerifyConfig
from rollover.environments.rewards.base import RewardSample, RewardSpec
from rollover.environments.rewards.final_expression import final_expression
from rollover.environments.rewards.math_verify import MathVerifyReward, is_endless

PAGE = Path(__file__).parents[2] / "docs/how-to/own-data.md"


class Pair(NamedTuple):
    is_right: bool
    reference: str
    response: str


def pairs() -> list[Pair]:
    lines = Path(__file__).with_name("answers.txt").read_text().splitlines()
    parts = [line.split(" || ") for line in lines if line[:1] in ("=", "!")]
    return [Pair(mark == "=", reference, response.replace("⏎", "\n")) for mark, reference, response in parts]


def reward(**settings: bool) -> MathVerifyReward:
    spec = RewardSpec(source="s", config=MathVerifyConfig(**settings), answer_column="answer")
    return MathVerifyReward(spec.config, spec)


def judged(reward: MathVerifyReward, pair: Pair, prompt: str = "p") -> bool:
    columns = {"answer": pair.reference}
    return bool(reward.score(RewardSample(prompt=prompt, columns=columns, completion=pair.response, completion_ids=())))


def by_the_library(pair: Pair, form: str) -> bool:
    reference, answer = (
        math_verify.parse(text, parsing_timeout=None) for text in (form.format(pair.reference), pair.response)
    )
    if any(is_endless(one) for one in (*reference, *answer)):  # it would compute until its process is killed
        return False
    return math_verify.verify(reference, answer, timeout_seconds=None)


def test_every_pair_is_judged_right_and_the_page_prints_the_numbers() -> None:
    ours = reward()
    wrong = [pair for pair in pairs() if judged(ours, pair) != pair.is_right]
    assert wrong == [] and len(pairs()) >= 120
    forms = [[by_the_library(pair, form) == pair.is_right for pair in pairs()] for form in ("{}", "${}$")]
    numbers = f"{len(pairs())} of {len(pairs())}, math-verify alone {max(map(sum, forms))}"
    assert numbers in re.sub(r"\s+", " ", PAGE.read_text()), numbers


@pytest.mark.parametrize(
    ("response", "prompt", "closed_thoughts", "is_right"),
    [
        ("It is \\boxed{42}.", "Think.<think>\n", False, False),
        ("It is \\boxed{42}.</think>", "Think.<think>\n", False, False),
        ("It is \\boxed{42}.</think>", "Think.<think>\n", True, True),
        ("<think>It is \\boxed{42}.</think>So.", "p", True, True),
        ("<think>It is \\boxed{42}.", "p", True, False),
        ("It is \\boxed{42}.", "Do not think.<think>\n\n</think>\n\n", False, True),
    ],
)
def test_an_answer_in_a_thought_counts_only_if_it_is_closed_and_asked_for(
    response: str, prompt: str, closed_thoughts: bool, is_right: bool
) -> None:
    assert judged(reward(closed_thoughts=closed_thoughts), Pair(is_right, "42", response), prompt) == is_right


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        (r"\boxed{5} wait, no: \boxed{7}", r"\boxed{7}"),
        (r"\boxed{1} and \boxed{\frac{1}{2}}", r"\boxed{1,\frac{1}{2}}"),
        (r"\boxed{7} = \boxed{7}", r"\boxed{7}"),
        (r"\boxed 42 is even", r"\boxed{42}"),
        (r"\boxed{\{1, 2\}}", r"\boxed{\{1, 2\}}"),
        (r"\boxed{x} or \boxed{", None),
        (r"x is 5 or 6.", "x is $5$, $6$"),
        ("It is 42", "It is 42"),
        ("They are (100,200)", "They are $(100,200)$"),
        (f"They are ({60 * '100,'} say", f"They are ({60 * '100,'} say"),  # each comma may be one of thousands
    ],
)
def test_the_final_expression_is_the_last_box_with_those_joined_to_it(text: str, expression: str | None) -> None:
    assert final_expression(text) == expression
