"""Reads the columns that travel with a prompt: values at dotted paths, messages and the reply that ends them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rollover.environments.conversation import is_messages, split_conversation

REPLY = "answer"
"""What a reward function calls the reply where it is the reference."""


def read_column(row: Mapping[str, Any], path: str) -> Any:
    """Read the value at a dotted path. Raises ``KeyError`` when a part is missing."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(path)
        value = value[part]
    return value


def read_reply(row: Mapping[str, Any], path: str | None) -> str | None:
    """Read the assistant's turn that ends the messages at ``path``; ``None`` where there is none."""
    content = _messages_at(row, path)
    return split_conversation(content, "the row").reply if content else None


def read_messages(row: Mapping[str, Any], path: str | None) -> list[dict[str, Any]] | None:
    """Read the messages at ``path`` without a reply; ``None`` where there is text or nothing."""
    content = _messages_at(row, path)
    return split_conversation(content, "the row").prompt if content else None


def read_reference(row: Mapping[str, Any], *, answer: str, prompt: str | None) -> Any:
    """Read the reference answer at the path ``answer``, which may be that of the prompt."""
    reply = read_reply(row, prompt) if answer == prompt else None
    return read_column(row, answer) if reply is None else reply


def _messages_at(row: Mapping[str, Any], path: str | None) -> list[dict[str, Any]] | None:
    if path is None or not has_value(row, path):
        return None
    content = read_column(row, path)
    return content if is_messages(content) else None


def is_there(row: Mapping[str, Any], path: str) -> bool:
    """Tell whether the row has the key, be its value null."""
    try:
        read_column(row, path)
    except KeyError:
        return False
    return True


def has_value(row: Mapping[str, Any], path: str) -> bool:
    """Tell whether the row holds a value that is not null."""
    if not is_there(row, path):
        return False
    value = read_column(row, path)
    return value is not None and not (isinstance(value, float) and math.isnan(value))  # NaN stands for null in tables
