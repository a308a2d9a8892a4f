"""Reads the columns that travel with a prompt: values at dotted paths, and conversations.

A conversation that ends with an assistant's turn shows the answer. That turn is never part of a prompt: it is the reply
that the model should learn to give.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from rollover.errors import DataError, parse_json

REPLY = "answer"
"""Name under which a reward function receives the reply if it is the reference."""

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}

Messages = list[dict[str, Any]]


class Conversation(NamedTuple):
    """Holds the turns to answer, and the assistant's turn that answers them."""

    prompt: Messages
    """The turns up to the reply."""
    reply: str | None
    """Text of the last turn if it is the assistant's."""


def is_messages(content: Any) -> bool:
    """Return whether ``content`` is a non-empty list of tables with a role."""
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(message, Mapping) and "role" in message for message in content)
    )


def parsed(content: Any) -> Any:
    """Return messages that are JSON text, or have the keys of ShareGPT, as messages, and anything else unchanged."""
    found = _read(content, "[{")
    if isinstance(found, list) and all(isinstance(m, Mapping) and {"from", "value"} <= m.keys() for m in found):
        found = [_of_sharegpt(message) for message in found]
    return found if is_messages(found) else content


def _of_sharegpt(message: Mapping[str, Any]) -> dict[str, Any]:
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    sender = message["from"]
    return {**others, "role": _SHAREGPT_ROLES.get(str(sender), sender), "content": message["value"]}


def _read(content: Any, opening: str) -> Any:
    if isinstance(content, str) and content.lstrip().startswith(opening):
        with suppress(ValueError):
            return parse_json(content, unique_keys=opening == "{")
    return content


def ends_with_reply(content: Any) -> bool:
    """Return whether ``content`` is a conversation whose last turn is the assistant's."""
    return is_messages(content) and content[-1]["role"] == "assistant"


def split_conversation(messages: Messages, where: str) -> Conversation:
    """Split off the reply. Raises ``DataError`` when nothing else is left, or the reply has no text."""
    if not ends_with_reply(messages):
        return Conversation(messages, None)
    *prompt, last = messages
    if not prompt:
        raise DataError(f"{where}: the messages hold only an assistant's turn, so there is no prompt; fix the row")
    text = text_of(last.get("content"))
    if not text:
        raise DataError(
            f"{where}: the messages end with an assistant's turn that has no text to learn from or compare with; "
            "fix the row, or delete that turn"
        )
    return Conversation(prompt, text)


def text_of(content: Any) -> str:
    """Read the text of a turn's content, in one piece or in parts; empty when it contains anything else."""
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        parts = [part.get("text") for part in content]
        return "".join(part for part in parts if part) if all(isinstance(part, str) for part in parts) else ""
    return content if isinstance(content, str) else ""


def read_column(row: Mapping[str, Any], path: str) -> Any:
    """Read the value at a dotted path, also within JSON text. Raises ``KeyError`` when a part is missing."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if not isinstance(value := _read(value, "{"), Mapping):
            raise KeyError(path)
        value = value[part]
    return value


def is_there(row: Mapping[str, Any], path: str) -> bool:
    """Return whether the row has the key, even if its value is null."""
    try:
        read_column(row, path)
    except KeyError:
        return False
    return True


def has_value(row: Mapping[str, Any], path: str) -> bool:
    if not is_there(row, path):
        return False
    value = read_column(row, path)
    return value is not None and not (isinstance(value, float) and math.isnan(value))  # NaN stands for null in tables


def joined(row: Mapping[str, Any], paths: Sequence[str], where: str) -> str:
    """Join the texts at several paths by an empty line, without blank ones. Raises ``DataError`` when a value is no
    text."""
    texts = [read_column(row, path) if has_value(row, path) else "" for path in paths]
    for path, text in zip(paths, texts, strict=True):
        if not isinstance(text, str):
            raise DataError(f"{where}: column {path!r} is not text, so it cannot be joined to make the prompt")
    return "\n\n".join(text for text in texts if text.strip())


def read_conversation(row: Mapping[str, Any], path: str | None) -> Conversation | None:
    """Read the messages at a dotted path; ``None`` if there is text or nothing."""
    if path is None or not has_value(row, path):
        return None
    content = parsed(read_column(row, path))
    return split_conversation(content, "the row") if is_messages(content) else None
