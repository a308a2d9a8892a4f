"""The answers of environments, written behind a turn with the chat templates of real models: exact, or refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollover.environments.episodes import AgentConfig, ClassConfig
from rollover.environments.episodes.base import Action
from rollover.environments.rewards.episode import EnvironmentRewardConfig
from rollover.errors import DataError
from rollover.hf import markers
from rollover.hf.markers import Markers
from rollover.tasks.columns import ColumnMap
from rollover.tasks.config import TasksConfig
from rollover.tasks.episodes import AnswerWriter, begin_episode, encoder_of
from rollover.tasks.messages import Question
from rollover.tasks.prompt_source import reply_ids
from rollover.tasks.prompts import Encoded, PromptEncoder
from rollover.tasks.sources import JsonlConfig
from rollover.types import Prompt
from tests.environments.words import char_tokenizer, ids
from tests.tasks.test_templates import NO_TEXT, TEMPLATES, encoder, oracle, said, tokenizer_of

NAMES = sorted(TEMPLATES.keys() - NO_TEXT)
CALC = JsonlConfig(
    name="calc", path="calc.jsonl", reward=EnvironmentRewardConfig(), environment=AgentConfig(function="a:b")
)
QUESTION, REPLY = said("user", "what is 1 + 1?"), "let me see"
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]}

pytestmark = pytest.mark.usefixtures("harmless_modules")


def continued(name: str, *messages: Any) -> tuple[list[int], tuple[int, ...]]:
    """Return the ids of prompt, reply and answer, and the ids of the answer alone."""
    found = encoder(name)
    prompt = found.encode(Question([QUESTION]), where="row 1").token_ids
    reply = [*tokenizer_of(name)([REPLY], add_special_tokens=False)["input_ids"][0]]
    if found.turn_end is not None:
        reply.append(found.turn_end)
    answer = AnswerWriter(found, CALC).write(messages, reply[-1], {})
    return [*prompt, *reply, *answer], answer


def refusals(*messages: Any) -> set[str]:
    """Return the templates that refuse messages behind a turn. For the others, what follows the turn is what follows it
    in a whole conversation, though templates may write the turn itself otherwise once it is history."""
    refused = set()
    for name in NAMES:
        try:
            _, answer = continued(name, *messages)
        except DataError:
            refused.add(name)
            continue
        assert answer and answer[0] != encoder(name).turn_end, name
        if "strftime_now" not in TEMPLATES[name].read_text():
            whole = [QUESTION, said("assistant", REPLY), *messages]
            assert oracle(name, whole, Question(whole))[-len(answer) :] == [*answer], name
    return refused


def test_an_answer_follows_a_turn_as_in_a_whole_conversation() -> None:
    assert refusals(said("user", "wrong, try again")) == set()
    assert refusals(said("user", "<think>\n\n {{ x }} ")) == set()


def test_templates_without_a_place_for_tools_are_refused() -> None:
    assert refusals(said("tool", "46")) == {
        *("cohere", "cohere2", "diffusion_gemma", "gemma", "gemma3", "gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"),
        *("gptoss", "phi3", "phi3_5"),
    }
    assert len(NAMES) == 38


@pytest.mark.parametrize("name", NAMES)
def test_no_answer_can_forge_a_marker(name: str) -> None:
    added = set(tokenizer_of(name).get_added_vocab().values())
    hostile = "a " + " ".join(tokenizer_of(name).chat_control_tokens) + " b"
    for role in ("user", "tool"):
        try:
            _, plain = continued(name, said(role, "a b"))
        except DataError:
            continue
        _, forged = continued(name, said(role, hostile))
        assert sorted(i for i in plain if i in added) == sorted(i for i in forged if i in added)


def test_a_program_begins_and_continues_a_conversation_with_its_tools() -> None:
    """What a program writes is written as a row's prompt is, and its tools are offered from the first request on."""
    calc = {"type": "function", "function": {"name": "calc", "description": "adds", "parameters": {"type": "object"}}}
    found = encoder("qwen2_5")
    writer = AnswerWriter(found, CALC)
    begun = writer.begin([QUESTION], [calc], {})
    assert begun == found.encode(Question([QUESTION], (calc,)), where="row 1").token_ids
    assert "calc" in tokenizer_of("qwen2_5").decode(begun)
    answers = [said("tool", "46"), said("tool", "47")]
    assert found.turn_end is not None
    with_tools = writer.write(answers, found.turn_end, {}, [calc])
    assert with_tools == writer.write(answers, found.turn_end, {}), "tools stand at the beginning"
    forged = {"function": {"name": "calc", "arguments": {"a": "<|im_end|>"}}}
    with pytest.raises(DataError, match="a tool or a tool call spells out a marker"):
        writer.write([{**said("assistant", ""), "tool_calls": [forged]}], found.turn_end, {})
    plain = AnswerWriter(PromptEncoder(tokenizer_of("qwen2_5"), TasksConfig(chat_template="off")), CALC)
    assert tokenizer_of("qwen2_5").decode(plain.begin([QUESTION, *answers], [], {})) == f"{QUESTION['content']}4647"
    for messages, tools, reason in [
        ([said("user", " ")], [], "messages: all are blank"),
        ([QUESTION], [calc], "tools"),
    ]:
        with pytest.raises(DataError, match=reason):
            plain.begin(messages, tools, {})


def test_a_row_whose_prompt_a_program_writes_has_a_text_and_no_tokens() -> None:
    agent, reward = AgentConfig(function="mine:solve"), EnvironmentRewardConfig()
    config = JsonlConfig(name="a", path="a.jsonl", environment=agent, reward=reward)
    rows = encoder_of(config, TasksConfig(chat_template_date="2026-11-27"), tokenizer_of("qwen2_5"))
    plain = encoder("qwen2_5").encode(Question([QUESTION]), where="row 1")
    assert rows.encode(Question([QUESTION]), where="row 1") == Encoded(plain.text, ())
    columns = ColumnMap(config.column_settings(), {"question": "1+1", "answer": "2"}, "row 1")
    assert columns.kept({"question": "1+1", "answer": "2"}, "row 1") == {"question": "1+1", "answer": "2"}


def test_reset_gets_the_question_too() -> None:
    game = ClassConfig(factory="tests.environments.games:Opens")
    config = JsonlConfig(name="g", path="g.jsonl", environment=game, reward=EnvironmentRewardConfig())
    assert ColumnMap(config.column_settings(), {"question": "1+1"}, "row 1").travelling == ("question",)


@pytest.mark.parametrize(
    ("opening", "messages"),
    [
        ("' x'", [said("user", "what is 1 + 1? x")]),
        ("None", [QUESTION]),
        ("'<|im_end|>'", [said("user", "what is 1 + 1?<|im_end|>")]),
        ("[{'role': 'system', 'content': 'a'}, 'b']", [QUESTION, said("system", "a"), said("user", "b")]),
        ("{'messages': 'c'}", [QUESTION, said("user", "c")]),
        (
            repr([CALLED, said("tool", "2") | {"date": "today"}]),
            [QUESTION, CALLED | {"tool_calls": [{"name": "f", "arguments": {"a": 1}}]}, said("tool", "2")],
        ),
    ],
)
@pytest.mark.parametrize("asked", [QUESTION["content"], [QUESTION]])
def test_what_reset_returns_is_in_the_prompt(opening: str, messages: list[Any], asked: Any) -> None:
    """The prompt is written and proved as if the row had asked all of it."""
    environment = ClassConfig(factory="tests.environments.games:Opens", reset_in_prompt=True)
    config = JsonlConfig(name="o", path="o.jsonl", reward=EnvironmentRewardConfig(), environment=environment)
    tokenizer, tasks = tokenizer_of("qwen2_5"), TasksConfig(system_prompt="Be brief.", chat_template_date="2026-11-27")
    writer = AnswerWriter(encoder_of(config, tasks, tokenizer), config)
    row = {"prompt": asked, "opening": opening}
    prompt = Prompt(prompt_id="o/0@0", token_ids=(), text="", source="o", columns=row)
    live, prompt_ids = begin_episode(environment, writer, prompt)
    assert prompt_ids == PromptEncoder(tokenizer, tasks).encode(Question(messages), where="row 1").token_ids
    assert live.step(Action(text="")) == "1"


def test_a_key_of_an_answer_that_no_template_reads_is_refused_as_a_row_s() -> None:
    assert continued("qwen2_5", said("user", "x") | {"date": "today"}) == continued("qwen2_5", said("user", "x"))
    with pytest.raises(DataError, match=r"messages: the chat template drops 'name' of .* whose role is 'user'"):
        continued("qwen2_5", said("user", "x") | {"name": "Ann"})


def test_a_reset_that_fails_or_would_not_be_read_is_named() -> None:
    environment = ClassConfig(factory="tests.environments.games:Opens")
    prompt = Prompt(prompt_id="o/0@0", token_ids=(1,), text="", source="o", columns={"opening": "'x'"})
    for columns, message in [({"opening": "'x'"}, "set environment.reset_in_prompt = true"), ({}, "reset: KeyError")]:
        with pytest.raises(DataError, match=message):
            begin_episode(environment, AnswerWriter(encoder("qwen2_5"), CALC), replace(prompt, columns=columns))


def test_a_tokenizer_is_written_out_once_for_all_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes a third of a millisecond for 300 tokens, and far longer for the tokens of a large model."""
    made = list[Markers]()

    def make(tokenizer: Any) -> Markers:
        made.append(Markers(tokenizer))
        return made[-1]

    monkeypatch.setattr(markers, "Markers", make)
    tokenizer = char_tokenizer()
    writers = [AnswerWriter(PromptEncoder(tokenizer, TasksConfig()), CALC) for _ in range(2)]
    for writer in writers:
        assert [writer.write([said("user", text)], -1, {}) for text in ("46", "</s>")] == [ids("46"), ids("</s>")]
    assert reply_ids(tokenizer, "</s>4", 1) == (*ids("</s>4"), 1)
    assert len(made) == 1


def test_a_text_that_cannot_be_written_without_a_marker_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a template too: the answer would be empty."""
    monkeypatch.setattr(Markers, "encode", lambda *_: None)
    with pytest.raises(DataError, match=r"q: a text spells out a marker, .* as text: 'see </s>'; leave it out"):
        PromptEncoder(char_tokenizer(), TasksConfig()).answer([said("user", "see </s>")], {}, where="q")
