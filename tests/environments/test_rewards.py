from __future__ import annotations

import asyncio
import json
import re
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from rollover.environments.rater import Rater
from rollover.environments.reasoning_gym import GymDataset, freeze
from rollover.environments.rewards import ExactConfig, FunctionConfig, RewardConfig, VerifierConfig, spec_from_json
from rollover.environments.rewards.base import RewardSample, RewardSpec
from rollover.environments.rewards.extraction import extract_answer
from rollover.environments.scoring import score_once
from rollover.errors import DataError, RewardError

FUNCTIONS = "tests.environments.functions"


def scored(config: RewardConfig, completion: str, columns: dict[str, Any], **spec: Any) -> float:
    """The reward of one completion, by a reward that has travelled as JSON."""
    defaults = {"answer_column": "answer"} if config.needs_answer else {}
    made = RewardSpec(source="s", config=config, columns=tuple(columns), **(defaults | spec))
    travelled = spec_from_json(json.loads(json.dumps(asdict(made))))
    reward = travelled.config.build(travelled)
    sample = RewardSample(prompt="p", columns=columns, completion=completion, completion_ids=(4, 5))
    return asyncio.run(score_once(reward, [sample])).rewards()[0]


def function(name: str, **fields: Any) -> RewardConfig:
    return FunctionConfig(function=f"{FUNCTIONS}:{name}", **fields)


async def test_a_response_goes_to_a_process_without_a_copy() -> None:
    """For 32,000 tokens, one would hold the event loop for 25 ms."""
    sample, jobs = RewardSample(prompt="p", columns={}, completion="x", completion_ids=(4, 5)), list[Any]()

    async def run(job: Any, begin: Any) -> dict[str, Any]:
        jobs.append(job)
        return {"values": [1.0]}

    pool: Any = SimpleNamespace(run=run)
    assert (await Rater(RewardSpec(source="s", config=function("length")), pool).rate([sample], "p/0@0")).values == [
        1.0
    ]
    assert jobs[0]["samples"][0]["completion_ids"] is sample.completion_ids


@pytest.mark.parametrize(
    ("how", "text", "answer"),
    [
        ("whole", "  a b \n", "a b"),
        ("hashes", "1 + 1 = 2\n#### 2\nso", "2"),
        ("hashes", "#### 1\n#### 2", "2"),
        ("hashes", "####\n 7", "7"),
        ("hashes", "1 + 1 = 2", None),
        ("tag", "<answer>1</answer> no: <answer>\n2 </answer>.", "2"),
        ("tag", "<answer>2", None),
        ("tag", "in <answer> tags: <answer>5</answer>", "5"),
        ("last_line", "a\n\n b \n\n", "b"),
        ("last_line", " \n", None),
    ],
)
def test_the_last_answer_is_found_where_it_is_looked_for(how: Any, text: str, answer: str | None) -> None:
    assert extract_answer(text, how) == answer


def test_a_pattern_gives_its_first_group_or_the_whole_match() -> None:
    assert extract_answer("x = 1, x = 2", "pattern", r"x = (\d)") == "2"
    assert extract_answer("1 22 3x", "pattern", r"\d+") == "3"
    assert extract_answer("none", "pattern", r"\d+") is None
    assert extract_answer("so \\boxed{5}", "pattern", r"Answer: (\d+)|boxed\{(\d+)\}") == "5"


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("<answer> Paris,  France </answer>", "Paris, France", 1.0),
        ("<answer>paris, France</answer>", "Paris, France", 0.0),
        ("Paris, France", "Paris, France", 0.0),
        ("<answer>7</answer>", 7, 1.0),
        ("<answer>7</answer>", 7.0, 1.0),
        ("<answer>7.5</answer>", 7.5, 1.0),
        ("<answer>b</answer>", ["a", "b"], 1.0),
        ("<answer>c</answer>", ["a", "b"], 0.0),
    ],
)
def test_exact_means_equal_up_to_white_space(completion: str, answer: Any, reward: float) -> None:
    assert scored(ExactConfig(), completion, {"answer": answer}) == reward


def test_the_reference_may_end_a_worked_solution() -> None:
    config = ExactConfig(extract="hashes", reference_extract="hashes")
    assert scored(config, "so\n#### 72", {"answer": "24 * 3 = 72\n#### 72"}) == 1.0
    with pytest.raises(RewardError, match="'24' has no '####'"):
        scored(config, "#### 72", {"answer": "24"})
    with pytest.raises(RewardError, match="is neither text nor a number"):
        scored(config, "#### 72", {"answer": {}})


def test_the_verifier_is_the_librarys() -> None:
    entry = GymDataset("chain_sum", {"min_terms": 1, "max_terms": 1}, seed=1).entry(0)
    config = VerifierConfig(extract="hashes")

    def score(completion: str) -> float:
        return scored(config, completion, freeze(entry), gym_dataset="chain_sum")

    assert score(f"steps\n#### {entry['answer']}") == 1.0
    assert score(f"steps\n#### +0{entry['answer']}.0") == 1.0
    assert score(entry["answer"]) == 0.0
    assert score("#### 99999999") == 0.0


def test_a_function_gets_lists_of_one_and_the_columns() -> None:
    assert scored(function("length"), "abc", {"answer": "x"}) == 3.0
    assert scored(function("awaited"), "abc", {}) == 0.25
    assert scored(function("narrow", params={"bonus": 2.0}), "xay", {"label": "a", "other": 1}) == 3.0


def test_a_column_never_takes_the_place_of_the_response() -> None:
    columns = {"completions": "of the dataset", "prompts": "x", "completion_ids": [1]}
    assert scored(function("length"), "abc", columns) == 3.0


def test_a_conversation_reaches_the_function_as_messages() -> None:
    columns = {"messages": [{"role": "user", "content": "hi"}], "level": 1}
    assert scored(function("conversation"), "yo", columns, prompt_column="messages") == 9.0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", "cannot import 'no_such_module' (ModuleNotFoundError"),
        (f"{FUNCTIONS}:lenght", "no function 'lenght' in tests.environments.functions; did you mean 'length'?"),
        (
            f"{FUNCTIONS}:wants_more",
            f"source 's': reward function {FUNCTIONS}:wants_more asks for 'rubric', which is neither prompts",
        ),
        (f"{FUNCTIONS}:narrow", "narrow asks for 'label'"),
        (f"{FUNCTIONS}:by_position", "takes 'prompts' by position only"),
    ],
)
def test_a_function_that_cannot_be_called_is_told_before_the_first_sample(path: str, message: str) -> None:
    spec = RewardSpec(source="s", config=FunctionConfig(function=path), columns=("answer",))
    with pytest.raises(DataError, match=re.escape(message)):
        spec.config.build(spec)


def test_a_parameter_no_one_takes_is_told() -> None:
    spec = RewardSpec(source="s", config=function("narrow", params={"bonsu": 1}), columns=("label",))
    with pytest.raises(DataError, match=r"takes no 'bonsu' .*did you mean 'bonus'"):
        spec.config.build(spec)
