"""Rows in the columns that public data sets and other frameworks have, and what Rollover reads in them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """A row, and the prompt and the reference answer in it, or part of the reason for which it is refused."""

    name: str
    row: dict[str, Any]
    text: str | None = None
    reference: str | None = None
    refused: str | None = None
    prompt: str | tuple[str, ...] | None = None
    answer: str | None = None


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def asked(*messages: Any, **columns: Any) -> dict[str, Any]:
    return {"prompt": [*messages], "answer": "2", **columns}


def said(speaker: str, text: str) -> dict[str, Any]:
    return {"from": speaker, "value": text}


TRUTH = {"style": "rule", "ground_truth": "2"}
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "call_1", "content": "7"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

SHAPES = (
    Shape("GSM8K", {"question": "1 + 1", "answer": "work\n#### 2"}, "1 + 1", "work\n#### 2"),
    Shape("MATH", {"problem": "1 + 1", "level": "Level 5", "solution": "\\boxed{2}"}, "1 + 1", "\\boxed{2}"),
    Shape("MATH-500 (answer and solution)", {"problem": "1", "solution": "w", "answer": "2"}, refused="answer_column"),
    Shape("MATH-500, answer chosen", {"problem": "1", "solution": "w", "answer": "2"}, "1", "2", answer="answer"),
    Shape("MetaMathQA", {"query": "1 + 1", "answer": "2", "type": "GSM"}, "1 + 1", "2"),
    Shape("Alpaca", {"instruction": "add", "input": "1, 2", "output": "3", "text": "."}, "add\n\n1, 2", "3"),
    Shape("Alpaca without input", {"instruction": "add", "input": "", "output": "3"}, "add", "3"),
    Shape("Alpaca, another answer", {"instruction": "add", "output": "3", "answer": "4"}, refused="set answer_column"),
    Shape("several columns", {"title": "add", "body": "1", "label": "2"}, "add\n\n1", "2", prompt=("title", "body")),
    Shape("Dolly", {"instruction": "add", "context": "", "response": "3"}, "add", "3", answer="response"),
    Shape("DAPO-Math", {"prompt": [user("1 + 1")], "reward_model": TRUTH, "ability": "MATH"}, "1 + 1", "2"),
    Shape("verl", {"data_source": "x", "prompt": [user("1")], "reward_model": TRUTH, "extra_info": {}}, "1", "2"),
    Shape("verl, reward_spec", {"prompt": [user("1")], "reward_spec": {"ground_truth": "2"}}, "1", "2"),
    Shape("SkyRL", {"prompt": [user("1")], "env_class": "gsm8k", "reward_spec": TRUTH}, "1", "2"),
    Shape("Open-R1", {"problem": "1", "solution": "2", "messages": [user("1")]}, refused="set prompt_column"),
    Shape(
        "Open-R1, problem chosen", {"problem": "1", "answer": "2", "messages": [user("3")]}, "1", "2", None, "problem"
    ),
    Shape("TRL, prompts of text", {"prompt": "1 + 1", "ground_truth": "2"}, "1 + 1", "2"),
    Shape("TRL, prompts of messages", {"prompt": [user("1 + 1")], "ground_truth": "2"}, "1 + 1", "2"),
    Shape("slime", {"prompt": [user("1 + 1")], "label": "2", "metadata": {}}, "1 + 1", "2"),
    Shape("OpenRLHF", {"input": "1 + 1", "answer": "2"}, "1 + 1", "2"),
    Shape("NeMo-RL", {"problem": "1 + 1", "expected_answer": "2"}, "1 + 1", "2", answer="expected_answer"),
    Shape("chat with a reply", {"messages": [user("1 + 1"), assistant("2")]}, "1 + 1", "2"),
    Shape("chat without an answer", {"messages": [user("1 + 1")]}, refused="none of the columns answer"),
    Shape("chat as JSON text", {"messages": '[{"role": "user", "content": "1"}]', "answer": "2"}, "1", "2"),
    Shape("chat with a history", {"messages": [user("1"), assistant("2"), user("3"), assistant("4")]}, "1 2 3", "4"),
    Shape(
        "chat as OpenAI exports it",
        {"messages": [user("1 + 1"), assistant("2", refusal=None, annotations=[], tool_calls=None, weight=1, id="m1")]},
        "1 + 1",
        "2",
    ),
    Shape(
        "an old thought, which Qwen3 leaves out",
        asked(user("1"), assistant("2", reasoning_content="3"), user("4"), answer="5"),
        "1 2 4",
        "5",
    ),
    Shape(
        "a thought before a call",
        asked(user("1"), assistant("", reasoning_content="3", tool_calls=[CALL]), RESULT, answer="5"),
        "1 3 add 7",
        "5",
    ),
    Shape("a speaker's name", asked(user("1") | {"name": "Ann"}), refused="drops 'name' of mess"),
    Shape("WildChat", asked(user("1") | {"language": "English", "toxic": False, "header": {"a": "b"}}), "1", "2"),
    Shape(
        "a call of OpenAI's old form",
        asked(user("1"), assistant("2", function_call={"name": "add"}), user("3")),
        refused="drops 'function_call' of message 2",
    ),
    Shape(
        "a key twice in JSON text",
        {"messages": '[{"role": "user", "content": "1", "content": "2"}]', "answer": "3"},
        refused="the key 'content' is there twice",
    ),
    Shape("chat in parts", asked(user([{"type": "text", "text": "1"}])), "1", "2"),
    Shape("parts with the nulls of parquet", asked(user([{"type": "text", "text": "1", "image": None}])), "1", "2"),
    Shape("nulls of parquet", asked(user("1") | {"name": None}, images=None), "1", "2"),
    Shape("empty list of images", {"prompt": "1", "answer": "2", "images": []}, "1", "2"),
    Shape("images", {"prompt": "1", "answer": "2", "images": ["a.png"]}, refused="only text is trained"),
    Shape("videos", {"prompt": "1", "answer": "2", "videos": ["x.mp4"]}, refused="column 'videos' is not empty"),
    Shape("audio", {"prompt": "1", "answer": "2", "audio": "x.wav"}, refused="column 'audio' is not empty"),
    Shape("a part with an image", asked(user([{"type": "image"}])), refused='a part is {"type": "image"}; leave'),
    Shape("ShareGPT", {"conversations": [said("human", "1"), said("gpt", "2")]}, "1", "2"),
    Shape("ShareGPT, messages", {"messages": [said("human", "1")], "answer": "2"}, "1", "2"),
    Shape(
        "ShareGPT with a history, as JSON text",
        {"conversations": json.dumps([*map(said, ("system", "human", "gpt", "human", "gpt"), "01234")])},
        "0 1 2 3",
        "4",
    ),
    Shape(
        "ShareGPT with a call",
        {"conversations": [said("human", "1"), said("function_call", "2"), said("observation", "3"), said("gpt", "4")]},
        refused="drops or changes the text of a message with role 'function_call'",
    ),
    Shape(
        "ShareGPT, mixed with roles",
        {"conversations": [said("human", "1"), assistant("2")]},
        refused="the message has no role; the keys are from, value",
        answer="conversations",
    ),
    Shape("conversations", {"conversations": [user("1")], "answer": "2"}, "1", "2"),
    Shape("conversations and a prompt", {"conversations": [user("1")], "prompt": "2"}, refused="set prompt_column"),
    Shape("a nested prompt", {"data": {"ask": "1"}, "answer": "2"}, "1", "2", prompt="data.ask"),
    Shape("tools", {"prompt": [user("1")], "tools": [TOOL], "answer": "2"}, "add 1", "2"),
    Shape("tools as JSON text", {"prompt": "1", "tools": '[{"name": "add"}]', "answer": "2"}, "add 1", "2"),
    Shape("tools that are no list", {"prompt": "1", "tools": "add", "answer": "2"}, refused="'tools': not JSON"),
    Shape(
        "a call and its result",
        asked(user("1"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "7"}),
        "1 add 7",
        "2",
    ),
    Shape("template arguments", asked(user("1"), chat_template_kwargs={"enable_thinking": False}), "1", "2"),
    Shape("an unknown argument", {"prompt": "1", "chat_template_kwargs": {"think": 1}, "answer": "2"}, refused="think"),
    Shape("an answer that is a number", {"question": "1 + 1", "answer": 2}, "1 + 1", "2"),
    Shape("an answer of null", {"question": "1 + 1", "answer": None}, refused="'answer' is null"),
    Shape("a prompt that is a number", {"question": 1, "answer": "2"}, refused="text or a list of messages"),
    Shape("a prompt of null", {"question": None, "answer": "2"}, refused="'question' is null"),
    Shape("a blank prompt", {"question": " \n", "answer": "2"}, refused="blank"),
    Shape("a blank message", {"prompt": [user(" ")], "answer": "2"}, refused="blank"),
    Shape("no messages", {"prompt": [], "answer": "2"}, refused="empty list of messages"),
    Shape("a message without a role", {"prompt": [{"content": "1"}], "answer": "2"}, refused="no role"),
    Shape("two prompts", {"prompt": "1", "question": "2", "answer": "3"}, refused="set prompt_column"),
    Shape("two answers", {"prompt": "1", "answer": "2", "label": "3"}, refused="set answer_column"),
    Shape("markers in a question", {"prompt": "a<|im_end|>b", "answer": "2"}, "a<|im_end|>b", "2"),
)
