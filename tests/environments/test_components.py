"""Several rewards of one source: their weighted sum, their components, and components that do not apply."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollover.environments.rewards import ExactConfig, FunctionConfig
from rollover.environments.rewards.base import RewardSettings, RewardSpec
from rollover.environments.scorer import RewardScorer
from rollover.errors import DataError, NoReward, RewardError
from rollover.types import Score, Trajectory
from tests.environments.test_scorer import FUNCTIONS, prompt, trajectory
from tests.environments.words import char_tokenizer


def function(what: str = "evaluated", **settings: Any) -> FunctionConfig:
    return FunctionConfig(function=f"{FUNCTIONS}:{what}", **({"workers": 0} | settings))


def scores(rewards: list[RewardSettings], *texts: str, named: bool = True, **columns: Any) -> list[Score | RewardError]:
    """The scores of the responses ``texts``, as one group."""

    async def use() -> list[Score | RewardError]:
        specs = [
            RewardSpec(
                source="s", config=one, component=one.component if named else "", answer_column="a", columns=("a",)
            )
            for one in rewards
        ]
        scorer = RewardScorer(specs, char_tokenizer())
        try:
            asked = prompt(**({"a": "x"} | columns))
            responses: list[Trajectory] = [trajectory(asked, text) for text in texts]
            return await scorer.score_group(responses)
        finally:
            await scorer.close()

    return asyncio.run(use())


def found(score: Score | RewardError) -> tuple[float, dict[str, float], bool | None]:
    assert isinstance(score, Score), score
    return float(score), dict(score.components), score.solved


EXACT = ExactConfig(extract="whole", workers=0)


def test_a_reward_is_the_weighted_sum_and_its_first_part_decides_solved() -> None:
    both = [EXACT, function(name="two", weight=0.5, pass_score=9)]
    assert found(scores(both, "[4]", a="[4]")[0]) == (3.0, {"exact": 1.0, "two": 4.0}, True)
    assert found(scores(both, "[4]")[0]) == (2.0, {"exact": 0.0, "two": 4.0}, False)
    assert found(scores([*both[::-1]], "[4]")[0]) == (2.0, {"exact": 0.0, "two": 4.0}, False)
    assert found(scores([EXACT, function(weight=0)], "[4]")[0]) == (0.0, {"exact": 0.0, "evaluated": 4.0}, False)


def test_the_entries_of_a_dict_are_components_and_their_sum_is_the_reward() -> None:
    text = "{'right': 1, 'style': 0.5}"
    assert found(scores([function()], text, named=False)[0]) == (1.5, {"right": 1.0, "style": 0.5}, True)
    named = scores([function(name="mine", weight=2)], text)[0]
    assert found(named) == (3.0, {"mine/right": 1.0, "mine/style": 0.5}, True)
    assert found(scores([function()], "[2]", named=False)[0]) == (2.0, {}, True)


def test_none_leaves_the_sum_to_the_other_rewards() -> None:
    both = [function(name="one"), EXACT]
    assert found(scores(both, "[None]", a="[None]")[0]) == (1.0, {"exact": 1.0}, None)
    [part] = scores([function(), EXACT], "{'a': None, 'b': 2}")
    assert found(part) == (2.0, {"evaluated/b": 2.0, "exact": 0.0}, True)
    for nothing in ("[None]", "[{'a': None}]"):
        [failure] = scores([function()], nothing)
        assert isinstance(failure, NoReward) and "returned None (does not apply)" in str(failure)


def test_a_weight_of_0_changes_nothing_that_is_trained() -> None:
    """A curve neither gives a reward to a response that has none, nor takes one away when it fails."""
    [failure] = scores([function(), function("awaited", weight=0)], "[None]")
    assert isinstance(failure, NoReward) and "reward tests.environments.functions:evaluated of source" in str(failure)
    broken = function(weight=0, retries=0)
    assert found(scores([EXACT, broken], "[1 / 0]", a="[1 / 0]")[0]) == (1.0, {"exact": 1.0}, True)
    assert isinstance(scores([broken], "[1 / 0]")[0], RewardError)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'a': float('nan')}", "returned nan, which is not finite"),
        ("{'a': 1e15, 'b': 1e16}", "returned 1e+16, which the trainer's float32"),
        ("{'a': 'x'}", "got a dict whose 'a' is str 'x'"),
        ("{'a': [1]}", "got a dict whose 'a' is list [1]"),
        ("{'a': {'b': 1}}", "got a dict whose 'a' is dict {'b': 1}"),
        ("{'a/b': 1}", "returned a component named str 'a/b'; name it with"),
        ("{1: 1}", "returned a component named int 1; name it with"),
        ("{'x' * 65: 1}", "returned a component named str 'xxx"),
        ("{str(n): 1 for n in range(33)}", "; a dict must have 1 to 32 entries"),
        ("{}", "got dict {}; a dict must have 1 to 32 entries"),
        ("[{'a': 1}, {'a': 2}]", "must return a list of 1 number, got list"),
    ],
)
def test_a_hostile_dict_fails_its_sample_with_name_and_value(text: str, message: str) -> None:
    good, bad, other = scores([function()], "{'a': 1}", text, "{'b': 1}")
    assert (found(good)[0], found(other)[1]) == (1.0, {"evaluated/b": 1.0})
    assert isinstance(bad, RewardError) and message in str(bad)


def test_a_reward_that_compares_siblings_sees_all_of_them_at_once() -> None:
    rank = function("ranked", group=True, name="rank", workers=1)
    group = scores([EXACT, rank], "aaa", "", "x")
    assert [found(one) for one in group] == [
        (1.0, {"exact": 0.0, "rank": 1.0}, False),
        (0.0, {"exact": 0.0}, False),
        (1.5, {"exact": 1.0, "rank": 0.5}, True),
    ]
    assert [float(one) for one in scores([rank], "abcd", "ab", named=False) if isinstance(one, Score)] == [1.0, 0.0]


def test_a_group_is_ranked_without_the_samples_whose_other_rewards_failed() -> None:
    rank = function("ranked", group=True, name="rank", workers=1)
    for rewards in ([function(), rank], [rank, function()]):
        first, failed, last = scores(rewards, "[1]", "[None, 1]", "[10]")
        assert (found(first)[0], isinstance(failed, RewardError), found(last)[0]) == (1.0, True, 11.0)
    with pytest.raises(DataError, match=r"must return a list of 2 numbers, got list \[1\]"):
        scores([function(group=True, workers=1)], "[1]", "b")
