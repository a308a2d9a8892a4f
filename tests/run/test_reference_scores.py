"""A dry run says what the rewards of a source give to its own reference answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollover.environments.rewards import ExactConfig, FunctionConfig, MathVerifyConfig
from rollover.errors import DataError
from rollover.run.reference_scores import reference_scores
from rollover.tasks.config import TasksConfig
from rollover.tasks.open import open_source
from rollover.tasks.sources import JsonlConfig
from rollover.trainer.scratch import build_tokenizer

FUNCTIONS = """
def right(completions, answer, **columns):
    return [float(answer[0] in completions[0])]
def right_number(completions, answer, **columns):
    return [float(completions[0] == answer[0])]
def boxed(completions, answer, **columns):
    return [float(completions[0] == f"\\\\boxed{{{answer[0]}}}") - 1 / 4]
def other(completions, level, **columns):
    return [float(completions[0] == level[0])]
def split(completions, answer, **columns):
    return [float(completions[0].split("####")[1].strip() == answer[0])]
def crash(completions, **columns):
    return [columns["truth"]]
def parts(completions, **columns):
    return [{"long": len(completions[0]), "never": 0}]
def none(completions, **columns):
    return [None]
def text(completions, **columns):
    return "1"
def alike(completions, **columns):
    return [0.0] * len(completions)


def rank(completions, **columns):
    return list(range(len(completions)))
"""


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """What is said about a reward of a source with these rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("scored.py").write_text(FUNCTIONS)

    def said(reward: Any, *rows: dict[str, Any], is_taught: bool = False, **settings: Any) -> list[str]:
        rows = rows or tuple({"question": f"{i} + 1", "answer": f"{i + 1}", "level": "hard"} for i in range(30))
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        scored = {"rewards": reward} if isinstance(reward, tuple) else {"reward": reward}
        source = JsonlConfig(name="rows", path="rows.jsonl", **scored, **settings)
        config = TasksConfig(train=(source,), chat_template="off", shuffle=False)
        opened = open_source(source, config, build_tokenizer([]), seed=0)
        return [*reference_scores(opened, build_tokenizer([]), group_size=3, is_taught=is_taught)]

    yield said
    sys.modules.pop("scored", None)


def function(name: str, **settings: Any) -> FunctionConfig:
    return FunctionConfig(function=f"scored:{name}", **settings)


def test_an_answer_that_scores_in_a_form_alone_is_told_with_the_form(said: Callable[..., list[str]]) -> None:
    whose = "reward exact, extract = 'hashes', gives"
    bare = f'{whose} 0 to the response "1", and 1 to the response "#### 1"; 20 of 20 reference answers score above 0'
    (line,) = said(ExactConfig(extract="hashes"))
    assert line.startswith(f"warning: {bare}. The prompt does not ask for '####': unless the model writes it by")
    assert said(ExactConfig(extract="hashes"), is_taught=True) == [bare]
    asked = {"question": "1 + 0, as #### x", "answer": "1"}
    assert said(ExactConfig(extract="hashes"), asked) == [bare.replace("20", "1")]
    worked = {"question": "1 + 0", "answer": "1 + 0 = 1\n#### 1"}
    (line,) = said(ExactConfig(extract="hashes", reference_extract="hashes"), worked)
    assert line.startswith(f'warning: {whose} 0 to the response "1", and 1 to the response "#### 1"; 1 of 1')
    config = ExactConfig(extract="pattern", answer_pattern=r"so it is (\d+)")
    (line,) = said(config)
    assert line.startswith("warning: 0 of 20 reference answers score above 0: reward exact, extract = 'pattern', gives")
    solved = {"question": "1 + 0", "answer": "1", "solution": "so it is 1"}
    (line,) = said(config, solved, answer_column="answer")
    assert line.endswith(
        'gives 0 to the response "1", and 1 to the response "so it is 1"; 1 of 1 reference answers score above 0'
    )


def test_a_function_that_compares_with_another_column_is_told(said: Callable[..., list[str]]) -> None:
    fine = 'gives 1 to the response "1"; 20 of 20 reference answers score above 0'
    for reward in (function("right"), MathVerifyConfig(), ExactConfig(extract="last_line")):
        (line,) = said(reward)
        assert line.startswith(f"reward {reward.label}") and line.endswith(fine)
    assert 'gives -0.25 to the response "1", and 0.75 to the response' in said(function("boxed"))[0]
    (line,) = said(function("other"))
    assert line.startswith("warning: 0 of 20 reference answers score above 0: reward scored:other gives 0 to the resp")
    assert line.endswith("compares with the wrong column or type: the row has answer (str), level (str)")
    (line,) = said(function("none"))
    assert "0 of 20 reference answers score above 0: reward scored:none gives nothing to" in line


def test_a_text_compared_with_a_number_is_told(said: Callable[..., list[str]]) -> None:
    (line,) = said(function("right_number"), {"question": "1 + 4", "answer": 5, "level": 1.5})
    assert line.endswith(
        'With answer, level as text it would give 1 to the response "5": the row has a number there, so compare numbers,'
        " or its str(...)"
    )


def test_a_function_that_fails_on_an_answer_is_told_with_the_error(said: Callable[..., list[str]]) -> None:
    *_, failed = said(function("crash"))
    assert failed.startswith('warning: the response "1" cannot be scored: reward scored:crash of source')
    assert "KeyError: 'truth' (scored.py, line " in failed
    scored, failed = said(function("split"))
    assert 'gives nothing to the response "1", and 1 to the response "#### 1"; 20 of 20' in scored
    assert "IndexError" in failed
    with pytest.raises(DataError, match="must return a list of 1 number"):
        said(function("text"))


def test_components_are_told_and_groups_are_scored_as_a_whole(said: Callable[..., list[str]]) -> None:
    (line,) = said(function("parts"))
    assert line == (
        'reward scored:parts gives 1 (long 1, never 0) to the response "1"; 20 of 20 reference answers score above 0'
    )
    lines = said((function("right", weight=0.0), ExactConfig(extract="whole", weight=-1.0)))
    assert [line.partition(" to the")[0][-7:] for line in lines] == ["gives 1"] * 2
    (line,) = said(function("alike", group=True))
    assert line == 'reward scored:alike gives 0 to the response "1"; its siblings were the same responses'
    (line,) = said(function("rank", group=True))
    assert line.startswith('reward scored:rank gives 2 to the response "1"; 20 of 20')


def test_rows_without_an_answer_say_so(said: Callable[..., list[str]]) -> None:
    assert said(function("none"), {"question": "why?"})[0].endswith("were not scored: no column holds one")
