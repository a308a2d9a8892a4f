"""Supervised examples: what a warm-up is shown."""

from __future__ import annotations

import json
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
from rollover.run.building import build_config
from rollover.tasks.calculator import Calculator
from rollover.tasks.config import TasksConfig
from rollover.tasks.episodes import demonstrations
from rollover.tasks.open import train_source
from rollover.tasks.prompt_source import examples
from rollover.tasks.sources import JsonlConfig, ReasoningGymConfig, SourceConfig
from rollover.trainer.scratch import build_tokenizer

pytestmark = pytest.mark.usefixtures("harmless_modules")


class Characters:
    """One token per character; 0 ends a text."""

    chat_template = None
    eos_token_id = 0

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(c) for c in t] for t in text]}

    def apply_chat_template(self, conversation: object, *, tokenize: bool, add_generation_prompt: bool) -> str:
        raise AssertionError("there is no template")

    def decode(self, token_ids: object, *, skip_special_tokens: bool) -> str:
        raise AssertionError("nothing is decoded")


SUMS = ReasoningGymConfig(
    name="sums",
    dataset="chain_sum",
    config={"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    reward=VerifierConfig(extract="hashes", workers=0),
)


def shown(config: SourceConfig, num: int, bare_answers: float = 0.0) -> list[tuple[str, str]]:
    tokenizer = Characters()
    source = train_source(TasksConfig(train=(config,), prompt_suffix="\n"), tokenizer, seed=0)
    drawn = islice(examples(source, tokenizer, end=tokenizer.eos_token_id, bare_answers=bare_answers), num)
    made = []
    for prompt_ids, response_ids in drawn:
        assert response_ids[-1] == 0, "the model must learn to stop"
        made.append(("".join(map(chr, prompt_ids)), "".join(map(chr, response_ids[:-1]))))
    return made


def test_a_sum_of_three_terms_is_worked_out_in_two_lines_and_an_answer() -> None:
    for prompt, response in shown(SUMS, 20):
        assert prompt.endswith("\n")
        first, second, answer = response.split("\n")
        assert first.rpartition(" = ")[2] == second.split()[0]
        assert answer == f"#### {second.rpartition(' = ')[2]}"


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_the_asked_share_shows_the_answer_alone(share: float) -> None:
    responses = [response for _, response in shown(SUMS, 400, share)]
    bare = [r for r in responses if r.startswith("####") and "\n" not in r]
    assert len(bare) == pytest.approx(400 * share, abs=2)
    worked = {prompt: response for prompt, response in shown(SUMS, 400)}
    for prompt, response in shown(SUMS, 400, share):
        assert worked[prompt].endswith(response), "a bare answer is the last line of the solution"


def test_a_file_is_learned_from_its_answer_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"question": q, "answer": a}) for q, a in [("1+1?", "2"), ("2+2?", "4")]))
    config = JsonlConfig(name="file", path=str(path), reward=ExactConfig())
    assert set(shown(config, 2)) == {("1+1?\n", "2"), ("2+2?\n", "4")}


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
    (path := tmp_path / "rows.jsonl").write_text(json.dumps({"question": "How?", "answer": text}))
    row = JsonlConfig(name="file", path=str(path), reward=ExactConfig(extract="whole"))
    end = tokenizer.eos_token_id
    _, response = next(examples(train_source(TasksConfig(train=(row,)), tokenizer, seed=0), tokenizer, end=end))[:2]
    assert (response.index(end), response[-1]) == (len(response) - 1, end)
    assert tokenizer.decode(response[:-1]) == taught
    thoughts = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert [token for token in response if token in thoughts] == (thoughts if "<think>" in text else [])


def test_a_number_is_taught_as_the_text_that_its_reward_expects(tmp_path: Path) -> None:
    """Libraries of tables write whole numbers with a fraction in a column in which one is missing."""
    (path := tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"question": "?", "answer": {n}}}\n' for n in (5.0, 2.5, 7))
    )
    config = JsonlConfig(name="file", path=str(path), reward=ExactConfig())
    assert sorted(answer for _, answer in shown(config, 3)) == ["2.5", "5", "7"]


def test_a_thought_after_a_prompt_that_has_closed_its_thought_is_refused(tmp_path: Path) -> None:
    path, closed = tmp_path / "rows.jsonl", "1+1? <think>\n\n</think>"
    config = JsonlConfig(name="file", path=str(path), reward=ExactConfig())
    for question, answer in ((closed, "2"), ("1+1?", "<think>easy</think>2")):
        path.write_text(json.dumps({"question": question, "answer": answer}))
        assert shown(config, 1) == [(f"{question}\n", answer)]
    path.write_text(json.dumps({"question": closed, "answer": "<think>easy</think>2"}))
    with pytest.raises(DataError, match=r"file/0@0 ends with a closed thought, and its response thinks; set chat_t"):
        shown(config, 1)


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
    source, lessons = train_source(config, tokenizer, seed=0), demonstrations(config, tokenizer, end=end)
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
    source, lessons = train_source(config, tokenizer, seed=0), demonstrations(config, tokenizer, end=0)
    with pytest.raises(DataError, match=r"^environment of prompt sums/0@0, demonstrate: KeyError: 'worked'$"):
        next(examples(source, tokenizer, end=0, lessons=lessons))


@pytest.mark.parametrize("name", ["tool", "agent", "sokoban"])
def test_the_packaged_experiments_with_episodes_can_be_read(name: str) -> None:
    assert build_config(name).tasks.train[0].environment is not None
