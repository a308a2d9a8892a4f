"""Supervised examples: what a warm-up is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from rollover.environments.episodes import ClassConfig
from rollover.environments.episodes.base import Action
from rollover.environments.rewards import ExactConfig, VerifierConfig
from rollover.errors import DataError
from rollover.tasks.calculator import Calculator
from rollover.tasks.config import TasksConfig
from rollover.tasks.episodes import demonstrations
from rollover.tasks.open import train_source
from rollover.tasks.prompt_source import examples
from rollover.tasks.sources import ReasoningGymConfig, SourceConfig
from rollover.trainer.scratch import build_tokenizer
from tests.environments.words import char_tokenizer
from tests.tasks.kit import jsonl, opened

pytestmark = pytest.mark.usefixtures("harmless_modules")


SUMS = ReasoningGymConfig(
    name="sums",
    dataset="chain_sum",
    config={"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    reward=VerifierConfig(extract="hashes", workers=0),
)


def shown(config: SourceConfig, num: int, bare_answers: float = 0.0) -> list[tuple[str, ...]]:
    tokenizer, made = char_tokenizer(), []
    source = opened(config, tokenizer=tokenizer, prompt_suffix="\n")
    for example in islice(examples(source, tokenizer, end=1, bare_answers=bare_answers), num):
        assert example[1][-1] == 1, "the model must learn to stop"
        made.append(tuple(tokenizer.decode(ids, skip_special_tokens=True) for ids in example[:2]))
    return made


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_the_asked_share_shows_the_answer_alone(share: float) -> None:
    responses = [response for _, response in shown(SUMS, 400, share)]
    bare = [r for r in responses if r.startswith("####") and "\n" not in r]
    assert len(bare) == pytest.approx(400 * share, abs=2)
    worked = {prompt: response for prompt, response in shown(SUMS, 400)}
    for prompt, response in shown(SUMS, 400, share):
        assert worked[prompt].endswith(response), "a bare answer is the last line of the solution"


def test_a_file_is_learned_from_its_answer_column(tmp_path: Path) -> None:
    rows = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}]
    assert set(shown(jsonl(tmp_path / "rows.jsonl", *rows), 2)) == {("1+1?\n", "2"), ("2+2?\n", "4")}


@pytest.mark.parametrize(
    ("text", "taught"),
    [
        ("Write <|end|> and stop.", "Write <|end|> and stop."),
        ("5<|end|>", "5"),
        ("<think>2+3</think>5<|end|>\n<|end|>\n", "<think>2+3</think>5"),
        ("<think><|end|></think>5", "<think><|end|></think>5"),
    ],
)
def test_a_response_ends_where_its_text_ends_whatever_it_spells_out(tmp_path: Path, text: str, taught: str) -> None:
    tokenizer: Any = build_tokenizer([])
    tokenizer.add_tokens(["<think>", "</think>"])
    row = {"question": "How?", "answer": text}
    source = jsonl(tmp_path / "rows.jsonl", row, reward=ExactConfig(extract="whole"))
    end = tokenizer.eos_token_id
    _, response = next(examples(opened(source, tokenizer=tokenizer), tokenizer, end=end))[:2]
    assert (response.index(end), response[-1]) == (len(response) - 1, end)
    assert tokenizer.decode(response[:-1]) == taught
    thoughts = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert [token for token in response if token in thoughts] == (thoughts if "<think>" in text else [])


def test_a_number_is_taught_as_the_text_that_its_reward_expects(tmp_path: Path) -> None:
    """Libraries of tables write whole numbers with a fraction in a column in which one is missing."""
    config = jsonl(tmp_path / "rows.jsonl", *({"question": "?", "answer": n} for n in (5.0, 2.5, 7)))
    assert sorted(answer for _, answer in shown(config, 3)) == ["2.5", "5", "7"]


def test_a_thought_after_a_prompt_that_has_closed_its_thought_is_refused(tmp_path: Path) -> None:
    path, closed, thought = tmp_path / "rows.jsonl", "1+1? <think>\n\n</think>", "<think>easy</think>2"
    for question, answer in ((closed, "2"), ("1+1?", thought)):
        config = jsonl(path, {"question": question, "answer": answer})
        assert shown(config, 1) == [(f"{question}\n", answer)]
    with pytest.raises(DataError, match=r"file/0@0 ends with a closed thought, and its response thinks; set chat_t"):
        shown(jsonl(path, {"question": closed, "answer": thought}), 1)


def test_a_task_without_solutions_is_refused_by_name() -> None:
    config = ReasoningGymConfig(name="maze", reward=VerifierConfig(workers=0))
    with pytest.raises(DataError, match="'maze' has no worked solutions"):
        shown(config, 1)


class LateCalculator(Calculator):
    async def step(self, action: Action) -> str | None:  # type: ignore[override]
        return super().step(action)


class Unprepared(Calculator):
    def demonstrate(self, row: Mapping[str, Any]) -> list[str]:
        return [row["worked"]]


@pytest.mark.parametrize("factory", ["rollover.tasks.calculator:Calculator", f"{__name__}:LateCalculator"])
def test_an_environment_shows_its_turns_and_its_answers_are_not_taught(factory: str) -> None:
    environment = ClassConfig(factory=factory)
    config = TasksConfig(train=(replace(SUMS, environment=environment),), prompt_suffix="\n")
    tokenizer = build_tokenizer(["1 + 2 = 3 - 4\n#### -3"])
    end = tokenizer.eos_token_id
    source, lessons = train_source(config, tokenizer, seed=0), demonstrations(config.train, config, tokenizer, end=end)
    lengths = []
    for index, (_, response, is_own) in enumerate(
        islice(examples(source, tokenizer, end=end, bare_answers=0.5, lessons=lessons), 20)
    ):
        parts = [
            (own, tokenizer.decode([token for token, _ in tokens]))
            for own, tokens in groupby(zip(response, is_own, strict=True), key=lambda each: each[1])
        ]
        answer = source.prompt(index).columns["answer"]
        assert parts[-1] == (True, f"#### {answer}<|end|>")
        for (mine, asked), (theirs, result) in pairwise(parts[:-1]) if parts[1:] else ():
            assert mine is not theirs
            if mine:
                assert result == f" {eval(asked.removesuffix(' =<|end|>'))}\n"
        lengths.append(len(parts))
    assert set(lengths) == {1, 5}, "half are guessed, half worked out in two operations"


def test_a_demonstration_that_fails_is_named() -> None:
    environment = ClassConfig(factory=f"{__name__}:Unprepared")
    config = TasksConfig(train=(replace(SUMS, environment=environment),))
    tokenizer = build_tokenizer(["1"])
    source, lessons = train_source(config, tokenizer, seed=0), demonstrations(config.train, config, tokenizer, end=0)
    with pytest.raises(DataError, match=r"^environment of prompt sums/0@0, demonstrate: KeyError: 'worked'$"):
        next(examples(source, tokenizer, end=0, lessons=lessons))
