from __future__ import annotations

import pytest

from rollover.errors import DataError
from rollover.tasks.config import TasksConfig
from rollover.tasks.prompts import PromptEncoder
from tests.environments.words import CHAT, char_tokenizer, ids

MESSAGES = [{"role": "user", "content": "hi"}]


def test_plain_text_gets_the_tokenizers_own_special_tokens_and_nothing_else() -> None:
    text, token_ids = PromptEncoder(char_tokenizer(), TasksConfig(prompt_suffix="?")).encode("1+1", where="x")
    assert text == "1+1?"
    assert token_ids == (0, *ids("1+1?"))


def test_a_templated_prompt_gets_no_second_special_token() -> None:
    tokenizer = char_tokenizer(CHAT)
    config = TasksConfig(system_prompt="Be brief.", prompt_suffix="!")
    for content in ("hi", MESSAGES):
        text, token_ids = PromptEncoder(tokenizer, config).encode(content, where="x")
        assert text == "<system>Be brief.\n<user>hi!\n<assistant>"
        assert token_ids == ids(text)
    assert MESSAGES == [{"role": "user", "content": "hi"}]


def test_ids_are_those_transformers_gives_for_the_conversation() -> None:
    tokenizer = char_tokenizer(CHAT)
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert list(PromptEncoder(tokenizer, TasksConfig()).encode(MESSAGES, where="x").token_ids) == expected


def test_a_system_message_of_the_row_is_kept() -> None:
    config = TasksConfig(system_prompt="Be brief.")
    content = [{"role": "system", "content": "Be long."}, *MESSAGES]
    text = PromptEncoder(char_tokenizer(CHAT), config).encode(content, where="x").text
    assert text == "<system>Be long.\n<user>hi\n<assistant>"


def test_off_leaves_plain_text_alone_although_there_is_a_template() -> None:
    encoder = PromptEncoder(char_tokenizer(CHAT), TasksConfig(chat_template="off"))
    assert encoder.encode("hi", where="x") == ("hi", (0, *ids("hi")))


def test_many_prompts_are_encoded_like_one_by_one() -> None:
    encoder = PromptEncoder(char_tokenizer(), TasksConfig())
    contents = [("a", "x"), ("bcd", "y"), ("", "z")][:2]
    assert encoder.encode_many(contents) == [encoder.encode(c, where=w) for c, w in contents]


@pytest.mark.parametrize(
    ("template", "config", "content", "message"),
    [
        (None, TasksConfig(chat_template="on"), "hi", "the tokenizer has no chat template"),
        (None, TasksConfig(system_prompt="s"), "hi", "tasks.system_prompt needs a tokenizer"),
        (None, TasksConfig(), MESSAGES, "f.jsonl, line 3: the prompt is a list of messages, which needs"),
        (CHAT, TasksConfig(chat_template="off"), MESSAGES, "which needs a chat template"),
        (CHAT, TasksConfig(), 7, "f.jsonl, line 3: a prompt is text or a list of messages"),
        (CHAT, TasksConfig(), [], "a prompt is text or a list of messages"),
        (CHAT, TasksConfig(), [{"role": "user"}], "a prompt is text or a list of messages"),
        (
            CHAT,
            TasksConfig(prompt_suffix="!"),
            [*MESSAGES, {"role": "assistant", "content": "yo"}],
            "prompt_suffix needs a last message of plain text by the user",
        ),
        ("{{ raise_exception('roles') }}", TasksConfig(), "hi", "line 3: the chat template rejects"),
    ],
)
def test_a_prompt_that_cannot_be_written_out_is_told(
    template: str | None, config: TasksConfig, content: object, message: str
) -> None:
    with pytest.raises(DataError) as caught:
        PromptEncoder(char_tokenizer(template), config).encode(content, where="f.jsonl, line 3")
    assert message in str(caught.value)
