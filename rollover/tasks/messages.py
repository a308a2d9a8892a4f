"""Reads what a row asks the model: text or messages, the tools on offer, and arguments for the chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollover.environments.columns import has_value
from rollover.errors import DataError, parse_json

TOOLS = "tools"
ARGUMENTS = "chat_template_kwargs"
_ROLE = re.compile(r"[A-Za-z][\w-]*")
_INSTRUCTING = ("system", "developer")
MEDIA = ("images", "image", "videos", "video", "audio", "audios")
FACTS = (
    "country", "created_at", "date", "hashed_ip", "header", "lang", "language", "model", "source", "state", "timestamp",
    "turn_identifier", "weight",
)  # fmt: skip
"""Keys that collections of chats have beside a message; no model reads them."""


class Question(NamedTuple):
    """Holds what a row asks."""

    content: Any
    """Text, or messages whose contents are text."""
    tools: tuple[Any, ...] = ()
    arguments: Mapping[str, Any] = {}


def asked(question: Question) -> str:
    """Return what is compared between questions: all messages but the system's, with white space folded."""
    content = question.content
    turns = [m["content"] for m in content if m["role"] not in _INSTRUCTING] if isinstance(content, list) else [content]
    return "\n".join(" ".join(str(turn).split()) for turn in turns)


def read_question(row: Mapping[str, Any], content: Any, where: str) -> Question:
    """Read the question of a row whose prompt is ``content``.

    Raises:
        DataError: the row holds media, or a prompt that is neither text nor messages, or blank.
    """
    if not isinstance(content, (str, list)):
        raise DataError(
            f"{where}: a prompt is text or a list of messages with role and content, "
            f"got {type(content).__name__}: {str(content)[:60]!r}"
        )
    if isinstance(content, str) and not content.strip():
        raise DataError(f"{where}: the prompt is blank; fix the row or leave it out")
    if not content:
        raise DataError(f"{where}: the prompt is an empty list of messages; fix the row")
    for name in MEDIA:
        if has_value(row, name) and row[name]:
            raise DataError(f"{where}: column {name!r} is not empty, and only text is trained; leave such rows out")
    messages = messages_of(content, where) if isinstance(content, list) else []
    for number, message in enumerate(messages, start=1):
        if message["role"] in ("user", "tool") and not message["content"].strip():
            blank = f"the text of the {message['role']}'s message is blank"
            raise DataError(f"{where}, message {number}: {blank}; fix the row")
    return Question(
        messages or content,
        _tools(row[TOOLS], where) if has_value(row, TOOLS) else (),
        row_arguments(row, where),
    )


def row_arguments(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the arguments of the chat template that a row has of its own."""
    return _arguments(row[ARGUMENTS], where) if has_value(row, ARGUMENTS) else {}


def is_text(message: Mapping[str, Any], key: str) -> bool:
    """Return whether a key of a message holds a text that a template has to write, which identifiers and the name of a
    tool beside its result are not."""
    value, role = message[key], message["role"]
    is_name = key in ("role", "id") or key.endswith("_id") or (role, key) == ("tool", "name")
    return isinstance(value, str) and bool(value.strip()) and not is_name


def messages_of(content: Sequence[Any], where: str) -> list[dict[str, Any]]:
    """Return messages with text as their contents: parts are joined, and keys without a value left out.

    Raises:
        DataError: a message has no role or text, or holds something else than text.
    """
    return [_message(message, f"{where}, message {number}") for number, message in enumerate(content, start=1)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"{where}: a message is a table with role and content, got {type(message).__name__}")
    found = {key: value for key, value in message.items() if value is not None and key not in FACTS}
    if not isinstance(role := found.get("role"), str) or not role:
        raise DataError(f"{where}: the message has no role; the keys are {', '.join(message)}")
    if not _ROLE.fullmatch(role):
        raise DataError(f"{where}: a role is a word, got {role!r:.60}")
    calls = [_call(call, where) for call in found.get("tool_calls") or ()]
    text = _text(found.get("content", "" if calls else None), where)
    found = {key: value for key, value in found.items() if key != "tool_calls"}
    return found | ({"tool_calls": calls} if calls else {}) | {"role": role, "content": text}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{where}: content is text or a list of parts, got {json.dumps(content, default=str)[:60]}")
    texts = []
    for part in content:
        keys = {key for key, value in part.items() if value} if isinstance(part, Mapping) else {""}
        if not keys <= {"type", "text"} or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            found = json.dumps(part, default=str)
            found = found if len(found) <= 60 else f"{found[:60]}..."
            raise DataError(f"{where}: only text can be trained, and a part is {found}; leave such rows out")
        texts.append(part["text"])
    return "".join(texts)


def _call(call: Any, where: str) -> Any:
    """Return a tool call whose arguments are a table."""
    if not isinstance(call, Mapping):
        raise DataError(f"{where}: tool_calls is a list of tables, got {type(call).__name__} in it")
    call = _without_nulls(call)
    function = call.get("function", call)
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, str):
        return call
    read = read_json(arguments, f"{where}, arguments of a tool call")
    return dict(call) | {"function": dict(function) | {"arguments": read}} if "function" in call else {
        **call, "arguments": read
    }  # fmt: skip


def _tools(tools: Any, where: str) -> tuple[Any, ...]:
    read = read_json(tools, f"{where}, column {TOOLS!r}") if isinstance(tools, str) else tools
    if not isinstance(read, list) or not all(isinstance(tool, Mapping) for tool in read):
        raise DataError(f"{where}: column {TOOLS!r} is a list of tables that describe functions")
    return tuple(_without_nulls(tool) for tool in read)


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    read = read_json(arguments, f"{where}, column {ARGUMENTS!r}") if isinstance(arguments, str) else arguments
    if not isinstance(read, Mapping):
        raise DataError(f"{where}: column {ARGUMENTS!r} is a table of arguments, got {type(read).__name__}")
    return {key: value for key, value in read.items() if value is not None}


def read_json(text: str, where: str) -> Any:
    """Read JSON in which no table has a key twice. Raises ``DataError`` for any other text."""
    try:
        return parse_json(text, unique_keys=True)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error}); fix the row") from None


def _without_nulls(value: Any) -> Any:
    """Leave out the keys without a value that tables of one schema are filled up with."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
