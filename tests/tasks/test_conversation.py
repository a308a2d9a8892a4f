"""Messages that end with an assistant's turn: asked without it, compared with it, taught it."""

from __future__ import annotations

import asyncio
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from rollover.environments.rewards import ExactConfig, FunctionConfig
from rollover.environments.rewards.base import RewardSample
from rollover.environments.scoring import score_once
from rollover.errors import DataError
from rollover.tasks.config import TasksConfig
from rollover.tasks.open import check_source, eval_sources, train_source
from rollover.tasks.prompt_source import PromptSource, examples
from rollover.tasks.sources import JsonlConfig, SourceConfig
from tests.environments.words import CHAT, char_tokenizer, ids

WHOLE = ExactConfig(extract="whole", workers=0)
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
REPLY = {"role": "assistant", "content": "It is 2.\n#### 2"}
PROMPT = "<system>Be brief.\n<user>1+1?\n<assistant>"


def config(path: Path, *rows: dict[str, Any], **fields: Any) -> SourceConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JsonlConfig(**{"name": "chat", "path": str(path), "reward": WHOLE, **fields})


def opened(source: SourceConfig, **fields: Any) -> PromptSource:
    return train_source(TasksConfig(train=(source,), **fields), char_tokenizer(CHAT), seed=0)


def taught(source: SourceConfig, num: int = 1) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return list(islice(examples(opened(source), char_tokenizer(CHAT), end=1), num))


def score(source: SourceConfig, completion: str) -> float:
    made = opened(source)
    prompt = made.prompt(0)
    sample = RewardSample(prompt=prompt.text, columns=prompt.columns, completion=completion, completion_ids=())
    spec = made.reward_specs[0]
    return asyncio.run(score_once(spec.config.build(spec), [sample])).rewards()[0]


def test_the_prompt_is_the_chat_template_of_the_turns_before_the_reply(tmp_path: Path) -> None:
    with_reply = opened(config(tmp_path / "a.jsonl", {"messages": [*ASKED, REPLY]})).prompt(0)
    without = opened(config(tmp_path / "b.jsonl", {"messages": ASKED, "answer": "2"})).prompt(0)
    tokenizer = char_tokenizer(CHAT)
    expected = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    assert with_reply.token_ids == without.token_ids == tuple(expected) == ids(PROMPT)
    assert with_reply.text == PROMPT


def test_supervised_examples_are_the_prompt_the_reply_and_an_end_token(tmp_path: Path) -> None:
    for fields in ({}, {"answer": "2"}):  # the short answer is for scoring
        source = config(tmp_path / "a.jsonl", {"messages": [*ASKED, REPLY], **fields})
        assert taught(source) == [(ids(PROMPT), (*ids("It is 2.\n#### 2"), 1))]


def test_earlier_turns_of_the_assistant_stay_in_the_prompt(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    source = config(tmp_path / "a.jsonl", {"messages": [*turns, {"role": "assistant", "content": "d"}]})
    assert taught(source) == [(ids("<user>a\n<assistant>b\n<user>c\n<assistant>"), (*ids("d"), 1))]


def test_a_reply_in_parts_of_text_is_their_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "It is "}, {"type": "text", "text": "2."}]
    source = config(tmp_path / "a.jsonl", {"messages": [*ASKED, {"role": "assistant", "content": parts}]})
    assert taught(source)[0][1] == (*ids("It is 2."), 1)


def test_the_suffix_goes_to_the_user_s_turn(tmp_path: Path) -> None:
    source = config(tmp_path / "a.jsonl", {"messages": [*ASKED, REPLY]})
    assert opened(source, prompt_suffix="!").prompt(0).text == "<system>Be brief.\n<user>1+1?!\n<assistant>"


@pytest.mark.parametrize("column", ["messages", "prompt", "data.turns"])
def test_without_an_answer_column_the_reply_is_the_reference(tmp_path: Path, column: str) -> None:
    messages = [*ASKED, REPLY]
    row = {"data": {"turns": messages}} if "." in column else {column: messages}
    chosen = {"prompt_column": column} if "." in column else {}
    whole = config(tmp_path / "a.jsonl", row, **chosen)
    assert score(whole, "It is 2.\n#### 2") == 1.0
    assert score(whole, "2") == 0.0
    hashes = ExactConfig(extract="whole", reference_extract="hashes", workers=0)
    assert score(config(tmp_path / "a.jsonl", row, reward=hashes, **chosen), "2") == 1.0


def test_an_answer_column_comes_first_else_the_prompt_column_decides(tmp_path: Path) -> None:
    row = {"messages": [*ASKED, REPLY], "answer": "two"}
    assert score(config(tmp_path / "a.jsonl", row), "two") == 1.0
    assert score(config(tmp_path / "a.jsonl", row, answer_column="messages"), "two") == 0.0
    assert score(config(tmp_path / "a.jsonl", row, answer_column="messages"), "It is 2.\n#### 2") == 1.0


def test_a_function_gets_the_turns_before_and_the_reply_as_the_answer(tmp_path: Path) -> None:
    reward = FunctionConfig(function="tests.environments.functions:of_a_conversation")
    assert score(config(tmp_path / "a.jsonl", {"messages": [*ASKED, REPLY]}, reward=reward), "x") == 2.0


def test_evaluation_prompts_do_not_show_the_reply_either(tmp_path: Path) -> None:
    source = config(tmp_path / "a.jsonl", {"messages": [*ASKED, REPLY]})
    (evaluation,) = eval_sources(TasksConfig(eval=(source,)), char_tokenizer(CHAT), num_prompts=1)
    assert evaluation.prompt(0).text == PROMPT


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [REPLY]}, "line 2: the messages hold only an assistant's turn, so there is no prompt"),
        ({"messages": [*ASKED, {**REPLY, "content": None}]}, "line 2: the messages end with an assistant's turn that"),
        ({"messages": [*ASKED, {**REPLY, "content": [{"type": "image"}]}]}, "that has no text to learn from"),
    ],
)
def test_a_row_whose_reply_cannot_be_used_is_named_with_its_line(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    source = config(tmp_path / "a.jsonl", {"messages": [*ASKED, REPLY]}, row)
    for use in (opened, lambda source: opened(source).prompt(1)):
        with pytest.raises(DataError) as caught:
            use(source)
        assert message in str(caught.value) and "a.jsonl" in str(caught.value)


def test_messages_without_the_reply_that_others_end_with_are_left_out(tmp_path: Path) -> None:
    source = opened(config(tmp_path / "a.jsonl", {"messages": [*ASKED, REPLY]}, {"messages": ASKED}))
    assert "leaves out 1 of 2 rows" in source.left_out
    assert "a.jsonl, line 2: the messages do not end with an assistant's turn, which is the refer" in source.left_out


@pytest.mark.parametrize(
    "more", [{"reasoning_content": "1 and 1"}, {"tool_calls": [{"function": {"name": "add", "arguments": {}}}]}]
)
def test_a_reply_of_which_a_part_would_not_be_taught_is_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    harmless = {"refusal": None, "annotations": [], "weight": 1, "id": "chatcmpl-1"}
    assert taught(config(tmp_path / "a.jsonl", {"messages": [*ASKED, REPLY | harmless]}))
    with pytest.raises(DataError, match=rf"prompt chat/0@0: sft would not teach '{min(more)}' of the last message"):
        taught(config(tmp_path / "a.jsonl", {"messages": [*ASKED, REPLY | more]}))


def test_rows_of_system_and_user_alone_still_need_an_answer_column(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none of the columns answer, label.* exists; .* set answer_column"):
        opened(config(tmp_path / "a.jsonl", {"messages": ASKED}))


def test_what_becomes_of_the_reply_is_known_before_a_run(tmp_path: Path) -> None:
    row = {"messages": [*ASKED, REPLY]}
    told = (
        (row, "the assistant's last turn is the reference answer and what sft teaches, and not in the prompt"),
        ({**row, "answer": "2"}, "the assistant's last turn is what sft teaches, and not in the prompt"),
        ({"messages": ASKED, "answer": "2"}, ""),
    )
    for written, reply in told:
        source, _ = check_source(config(tmp_path / "a.jsonl", written), TasksConfig(), char_tokenizer(CHAT))
        assert source is not None and source.reply == reply
