"""Splits a conversation into the turns that are the prompt and the reply that the model should learn to give.

A conversation that ends with an assistant's turn shows the answer. That turn is never part of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rollover.errors import DataError

Messages = list[dict[str, Any]]


class Conversation(NamedTuple):
    """Holds the turns to answer, and the assistant's turn that answers them.

    Example: ``[{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]`` has the first as its
    prompt and ``"2"`` as its reply.
    """

    prompt: Messages
    """The turns up to the reply."""
    reply: str | None
    """Text of the last turn if it is the assistant's."""


def is_messages(content: Any) -> bool:
    """Tell whether ``content`` is a list of ``{"role", "content"}``, and not an empty one."""
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in content)
    )


def ends_with_reply(content: Any) -> bool:
    """Tell whether ``content`` is a conversation whose last turn is the assistant's."""
    return is_messages(content) and content[-1]["role"] == "assistant"


def split_conversation(messages: Messages, where: str) -> Conversation:
    """Take the reply off. Raises ``DataError`` when nothing is left, or the reply has no text."""
    if not ends_with_reply(messages):
        return Conversation(messages, None)
    *prompt, last = messages
    if not prompt:
        raise DataError(f"{where}: the messages are an assistant's turn alone, so nothing is asked; mend the row")
    text = _text(last["content"])
    if not text:
        raise DataError(
            f"{where}: the messages end with an assistant's turn that has no text to learn from or compare with; "
            "mend the row, or delete that turn"
        )
    return Conversation(prompt, text)


def _text(content: Any) -> str:
    """Read the text of a turn, in one piece or in parts; empty when there is something else in it."""
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        parts = [part.get("text") for part in content]
        return "".join(part for part in parts if part) if all(isinstance(part, str) for part in parts) else ""
    return content if isinstance(content, str) else ""
