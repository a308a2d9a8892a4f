"""Messages that end with an assistant's turn: asked without it, compared with it, taught it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollover.environments.rewards import ExactConfig, FunctionConfig
from rollover.environments.rewards.base import RewardSample
from rollover.environments.scoring import score_once
from rollover.errors import DataError
from rollover.tasks.config import TasksConfig
from rollover.tasks.open import check_source
from rollover.tasks.prompt_source import PromptSource, examples
from rollover.tasks.sources import SourceConfig
from tests.environments.words import CHAT, char_tokenizer, ids
from tests.tasks import kit
from tests.tasks.kit import jsonl

WHOLE = ExactConfig(extract="whole", workers=0)
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
REPLY = {"role": "assistant", "content": "It is 2.\n#### 2"}
ROW = {"messages": [*ASKED, REPLY]}
PROMPT = "<system>Be brief.\n<user>1+1?\n<assistant>"


def config(folder: Path, *rows: dict[str, Any], **fields: Any) -> SourceConfig:
    return jsonl(folder / "a.jsonl", *rows, **({"reward": WHOLE} | fields))


def opened(source: SourceConfig) -> PromptSource:
    return kit.opened(source, tokenizer=char_tokenizer(CHAT))


def taught(source: SourceConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return next(examples(opened(source), char_tokenizer(CHAT), end=1))[:2]


def score(source: SourceConfig, completion: str) -> float:
    made = opened(source)
    prompt = made.prompt(0)
    sample = RewardSample(prompt=prompt.text, columns=prompt.columns, completion=completion, completion_ids=())
    spec = made.reward_specs[0]
    return asyncio.run(score_once(spec.config.build(spec), [sample])).rewards()[0]


def test_the_prompt_is_the_chat_template_of_the_turns_before_the_reply(tmp_path: Path) -> None:
    expected = char_tokenizer(CHAT).apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    for row in (ROW, {"messages": ASKED, "answer": "2"}):
        prompt = opened(config(tmp_path, row)).prompt(0)
        assert (prompt.token_ids, prompt.text) == (tuple(expected), PROMPT), row
    assert tuple(expected) == ids(PROMPT)


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        ROW | {"answer": "2"},
        {"messages": [*ASKED, REPLY | {"content": [{"type": "text", "text": t} for t in ("It is ", "2.\n#### 2")]}]},
    ],
    ids=["a text", "beside the short answer, which is for scoring", "parts of text"],
)
def test_supervised_examples_are_the_prompt_the_reply_and_an_end_token(tmp_path: Path, row: dict[str, Any]) -> None:
    assert taught(config(tmp_path, row)) == (ids(PROMPT), (*ids("It is 2.\n#### 2"), 1))


@pytest.mark.parametrize(
    ("row", "fields", "right"),
    [
        (ROW, {}, "It is 2.\n#### 2"),
        ({"data": {"turns": ROW["messages"]}}, {"prompt_column": "data.turns"}, "It is 2.\n#### 2"),
        (ROW, {"reward": ExactConfig(extract="whole", reference_extract="hashes", workers=0)}, "2"),
        (ROW | {"answer": "two"}, {}, "two"),
        (ROW | {"answer": "two"}, {"answer_column": "messages"}, "It is 2.\n#### 2"),
    ],
)
def test_the_reply_is_the_reference_unless_there_is_an_answer_column(
    tmp_path: Path, row: dict[str, Any], fields: dict[str, Any], right: str
) -> None:
    for completion in ("It is 2.\n#### 2", "2", "two"):
        assert score(config(tmp_path, row, **fields), completion) == (completion == right), completion


def test_a_function_gets_the_turns_before_and_the_reply_as_the_answer(tmp_path: Path) -> None:
    reward = FunctionConfig(function="tests.environments.functions:of_a_conversation")
    assert score(config(tmp_path, ROW, reward=reward), "x") == 2.0


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ([REPLY], "line 2: the messages hold only an assistant's turn, so there is no prompt"),
        ([*ASKED, {**REPLY, "content": None}], "line 2: the messages end with an assistant's turn that"),
        ([*ASKED, {**REPLY, "content": [{"type": "image"}]}], "that has no text to learn from"),
    ],
)
def test_a_row_whose_reply_cannot_be_used_is_named_with_its_line(tmp_path: Path, reply: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"a\.jsonl, .*{message}"):
        opened(config(tmp_path, ROW, {"messages": reply}))


def test_messages_without_the_reply_that_others_end_with_are_left_out(tmp_path: Path) -> None:
    source = opened(config(tmp_path, ROW, {"messages": ASKED}))
    assert "leaves out 1 of 2 rows" in source.left_out
    assert "a.jsonl, line 2: the messages do not end with an assistant's turn, which is the refer" in source.left_out


@pytest.mark.parametrize(
    "more", [{"reasoning_content": "1 and 1"}, {"tool_calls": [{"function": {"name": "add", "arguments": {}}}]}]
)
def test_a_reply_of_which_a_part_would_not_be_taught_is_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    harmless = {"refusal": None, "annotations": [], "weight": 1, "id": "chatcmpl-1"}
    assert taught(config(tmp_path, {"messages": [*ASKED, REPLY | harmless]}))
    with pytest.raises(DataError, match=rf"prompt file/0@0: sft would not teach '{min(more)}' of the last message"):
        taught(config(tmp_path, {"messages": [*ASKED, REPLY | more]}))


@pytest.mark.parametrize(
    ("row", "reply"),
    [
        (ROW, "the assistant's last turn is the reference answer and what sft teaches, and not in the prompt"),
        (ROW | {"answer": "2"}, "the assistant's last turn is what sft teaches, and not in the prompt"),
        ({"messages": ASKED, "answer": "2"}, ""),
    ],
)
def test_what_becomes_of_the_reply_is_known_before_a_run(tmp_path: Path, row: dict[str, Any], reply: str) -> None:
    source, _ = check_source(config(tmp_path, row), TasksConfig(), char_tokenizer(CHAT)) or (None, None)
    assert source is not None and source.reply == reply
