from __future__ import annotations

import re
from pathlib import Path

import pytest
from jinja2 import Environment

from rollover.errors import DataError
from rollover.tasks.config import TasksConfig
from rollover.tasks.messages import Question, read_question
from rollover.tasks.prompts import PromptEncoder
from rollover.tasks.template import ChatTemplate
from tests.environments.words import CHAT, char_tokenizer, ids

DATED = TasksConfig(chat_template_date="2026-11-27")
MESSAGES = [{"role": "user", "content": "hi"}]


def test_plain_text_gets_only_the_tokenizers_own_special_tokens() -> None:
    text, token_ids = PromptEncoder(char_tokenizer(), TasksConfig(prompt_suffix="?")).encode(Question("1+1"), where="x")
    assert text == "1+1?"
    assert token_ids == (0, *ids("1+1?"))


def test_a_templated_prompt_gets_no_second_special_token() -> None:
    tokenizer = char_tokenizer(CHAT)
    config = TasksConfig(system_prompt="Be brief.", prompt_suffix="!")
    for content in ("hi", MESSAGES):
        text, token_ids = PromptEncoder(tokenizer, config).encode(Question(content), where="x")
        assert text == "<system>Be brief.\n<user>hi!\n<assistant>"
        assert token_ids == ids(text)
    assert MESSAGES == [{"role": "user", "content": "hi"}]


def test_a_system_message_of_the_row_is_kept() -> None:
    config = TasksConfig(system_prompt="Be brief.")
    content = [{"role": "system", "content": "Be long."}, *MESSAGES]
    text = PromptEncoder(char_tokenizer(CHAT), config).encode(Question(content), where="x").text
    assert text == "<system>Be long.\n<user>hi\n<assistant>"


def test_off_leaves_plain_text_alone_although_there_is_a_template() -> None:
    encoder = PromptEncoder(char_tokenizer(CHAT), TasksConfig(chat_template="off"))
    assert encoder.encode(Question("hi"), where="x") == ("hi", (0, *ids("hi")))


def test_many_prompts_are_encoded_like_one_by_one() -> None:
    encoder = PromptEncoder(char_tokenizer(), TasksConfig())
    contents = [(Question("a"), "x"), (Question("bcd"), "y")]
    assert encoder.encode_many(contents) == [encoder.encode(c, where=w) for c, w in contents]


def test_what_a_table_fills_a_call_up_with_is_no_argument_of_it() -> None:
    def calls(**call: object) -> object:
        turns = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [{"id": None, "function": call}]}]
        return read_question({}, turns, "x").content[1]["tool_calls"]

    assert calls(name="add", arguments={"x": 1, "y": None}) == [{"function": {"name": "add", "arguments": {"x": 1}}}]
    said = calls(name="add", arguments='{"x": null}')
    assert said == [{"function": {"name": "add", "arguments": {"x": None}}}]


@pytest.mark.parametrize(
    ("template", "config", "content", "message"),
    [
        (None, TasksConfig(chat_template="on"), "hi", "the tokenizer has no chat template"),
        (None, TasksConfig(system_prompt="s"), "hi", "tasks.system_prompt needs a tokenizer"),
        (None, TasksConfig(), MESSAGES, "f.jsonl, line 3: the prompt is a list of messages, which needs"),
        (CHAT, TasksConfig(chat_template="off"), MESSAGES, "which needs a chat template"),
        (CHAT, TasksConfig(), [{"role": "user"}], "line 3, message 1: content is text or a list of parts, got null"),
        (CHAT, TasksConfig(), [{"role": "user", "content": 7}], "content is text or a list of parts, got 7"),
        (CHAT, TasksConfig(), " \n", "line 3: the prompt is blank"),
        (None, TasksConfig(), "", "line 3: the prompt is blank"),
        (CHAT, TasksConfig(chat_template_kwargs={"x": 1}), "hi", "chat_template_kwargs.x: the chat template reads no"),
        (f"{{% if x %}}{{% endif %}}{CHAT}", TasksConfig(chat_template_kwargs={"x": "false"}), "hi", "omit the quotes"),
        (f"{{{{ x }}}}{CHAT}", TasksConfig(chat_template_kwargs={"x": ["</s>"]}), "hi", "x holds the marker"),
        (
            CHAT,
            TasksConfig(),
            [*MESSAGES, {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}],
            "leaves out the call of the tool 'add'",
        ),
        (CHAT, TasksConfig(), [{"role": "user<|im_end|>", "content": "hi"}], "a role is a word, got 'user<|im_end|>'"),
        (None, TasksConfig(chat_template_kwargs={"x": 1}), "hi", "tasks.chat_template_kwargs.x needs a chat template"),
        (CHAT, TasksConfig(chat_template_kwargs={"tools": []}), "hi", "chat_template_kwargs.tools is given to every"),
        (f"{{{{ strftime_now('%Y') }}}}{CHAT}", TasksConfig(), "hi", "set tasks.chat_template_date"),
        *(
            (f"{{{{ strftime_now({format}) }}}}{CHAT}", DATED, "hi", "the date of today in a format that it computes")
            for format in ("y", "format='%Y'", '"%Y" ~ "-%m"')
        ),
        (None, DATED, "hi", "tasks.chat_template_date needs a tokenizer with a"),
        (CHAT, TasksConfig(chat_template_file="none.jinja"), "hi", "chat_template_file: none.jinja cannot be read"),
        (
            CHAT,
            TasksConfig(prompt_suffix="!"),
            [*MESSAGES, {"role": "assistant", "content": "yo"}],
            "prompt_suffix needs a last message of plain text by the user",
        ),
        ("{{ raise_exception('roles') }}", TasksConfig(), "hi", "line 3: the chat template rejects"),
    ],
)
def test_an_unwritable_prompt_is_told(template: str | None, config: TasksConfig, content: object, message: str) -> None:
    where = "f.jsonl, line 3"
    with pytest.raises(DataError, match=re.escape(message)):
        PromptEncoder(char_tokenizer(template), config).encode(read_question({}, content, where), where=where)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}\n{{ m.content }\n{% endfor %}", ", line 2: unexpected '}'"),
        ("{% for m in messages %}\n\n{{ m.content | shout }}{% endfor %}", ", line 3: No filter named 'shout'"),
        ("{% if True %}", ", line 1: Unexpected end of template"),
    ],
)
def test_a_template_that_cannot_be_compiled_is_named_with_its_line(tmp_path: Path, template: str, reason: str) -> None:
    (file := tmp_path / "chat_template.jinja").write_text(template)
    own = char_tokenizer(template)
    own.name_or_path = str(tmp_path)
    for tokenizer, config in ((own, TasksConfig()), (char_tokenizer(), TasksConfig(chat_template_file=str(file)))):
        with pytest.raises(DataError, match="^" + re.escape(f"{file}{reason}")):
            PromptEncoder(tokenizer, config)
    file.unlink()
    with pytest.raises(
        DataError, match="^" + re.escape(f"{tmp_path / 'tokenizer_config.json'}, chat_template{reason}")
    ):
        PromptEncoder(own, TasksConfig())


def test_a_template_file_is_always_read_without_its_byte_order_mark(tmp_path: Path) -> None:
    (file := tmp_path / "mine.jinja").write_text("\n")
    config = TasksConfig(chat_template_file=str(file))
    with pytest.raises(DataError, match=r"tasks.chat_template_file: .*mine.jinja is blank; correct the path"):
        PromptEncoder(char_tokenizer(CHAT), config)
    file.write_text(CHAT, encoding="utf-8-sig")
    assert PromptEncoder(char_tokenizer(), config).encode(Question("hi"), where="x").text == "<user>hi\n<assistant>"
    with pytest.raises(DataError, match=r"no chat template can be chosen .*; set tasks.chat_template_file"):
        PromptEncoder(char_tokenizer({"a": CHAT}), TasksConfig())  # type: ignore[arg-type]


def test_a_template_is_read_once_for_the_arguments_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, read = PromptEncoder(char_tokenizer(CHAT + "{{ a or b }}"), TasksConfig()), list[str]()
    lex = Environment.lex
    monkeypatch.setattr(Environment, "lex", lambda self, text: read.append(text) or lex(self, text))
    for value in range(3):
        encoder.encode(Question("hi", arguments={"a": value, "b": value}), where="x")
    assert len(read) == 2  # with tools, and without
    with pytest.raises(DataError, match="c: the chat template reads no argument of this name"):
        encoder.encode(Question("hi", arguments={"c": 1}), where="x")


def test_a_template_that_cuts_a_text_is_refused_with_the_place(tmp_path: Path) -> None:
    file = tmp_path / "cuts.jinja"
    file.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content[:30] }}{% endfor %}")
    template = ChatTemplate(char_tokenizer(), file=file)
    assert template.write([{"role": "user", "content": "1+1"}]).text == "<user>1+1"
    reason = r"role 'user': of 36 characters .* first 30, .* changes '234567'; .*tasks.chat_template_file"
    with pytest.raises(DataError, match=reason):
        template.write([{"role": "user", "content": "0123456789" * 3 + "234567"}])


def test_a_template_of_another_model_or_without_a_header_for_the_reply_is_told(tmp_path: Path) -> None:
    turns = "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}"
    (file := tmp_path / "other.jinja").write_text(turns)
    config = TasksConfig(chat_template_file=str(file))
    foreign, header = PromptEncoder(char_tokenizer(), config).findings()
    assert "template's <|start|>, <|end|> is plain text" in foreign
    assert header == "the template writes '<|start|>assistant' before a reply, but not at the end of a prompt"
    file.write_text(turns + "{% if add_generation_prompt %}<|start|>assistant {% endif %}")
    assert PromptEncoder(char_tokenizer(), config).findings() == [foreign]
    file.write_text(
        "{% for m in messages %}{{ '[Q] ' + m.content + ' [A]' if m.role == 'user' else m.content }}{% endfor %}"
    )
    assert PromptEncoder(char_tokenizer(), config).findings() == [], "a question's own end begins the reply"
