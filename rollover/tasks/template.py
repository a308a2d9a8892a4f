"""Writes conversations out with a chat template, and proves that the template kept them.

A template is a program: it may drop a turn, rewrite it, or write a user's text where the model expects structure. So
each kind of conversation is first written out with a word of letters and digits in place of each text. Between these
words stands what the template itself writes. A real conversation has to consist of the same pieces around its own
texts, each of which is there once and whole, apart from white space at its ends.
"""

from __future__ import annotations

import datetime
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from rollover.errors import DataError

Messages = Sequence[Mapping[str, Any]]
_CLOCK = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
_THOUGHT_END = "</think>"


class Span(NamedTuple):
    """The place of a message's text in a written conversation.

    Example: ``Span(start=6, end=9, role="user")`` of ``"<user>1+1\\n<assistant>"``.
    """

    start: int
    end: int
    role: str


class Written(NamedTuple):
    """A conversation as the template writes it.

    Example: ``Written("<user>1+1\\n<assistant>", (Span(6, 9, "user"),))``.
    """

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class _Outline:
    """Holds what a template writes around the texts of one kind of conversation."""

    order: tuple[int, ...]
    """The messages whose texts follow the pieces, by number."""
    pieces: tuple[str, ...]
    """One more than there are texts."""


class ChatTemplate:
    """Writes conversations out with the chat template of a tokenizer.

    Args:
        source: the template, in place of the tokenizer's own.
        day: the date that the template sees.

    Raises ``DataError`` when the template reads the clock and no day is given.

    Example: ``ChatTemplate(tokenizer).write([{"role": "user", "content": "1+1"}]).text`` is
    ``"<user>1+1\\n<assistant>"``, say.
    """

    def __init__(self, tokenizer: Any, *, source: str | None = None, day: datetime.date | None = None) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self._day = day
        self._outline = lru_cache(maxsize=256)(self._outline_of)
        for with_tools in (False, True):
            self._text(with_tools)

    def write(
        self, messages: Messages, *, tools: Sequence[Any] = (), arguments: Mapping[str, Any] | None = None
    ) -> Written:
        """Write a conversation out, up to the place where the assistant answers.

        Raises:
            DataError: the template refuses the conversation, changes or drops a text, or has no place for the tools.
        """
        outline = self._outline(_kind_of(messages, tools, arguments or {}))
        text = self._render(messages, tools, arguments or {})
        spans = _spans(text, messages, outline)
        if spans is None:
            raise DataError("the chat template takes the text of a message for structure, or rewrites it")
        return Written(text, spans)

    def after_reply(self) -> str:
        """Return what the template writes behind an assistant's turn, which ends with the conversation."""
        word = _word(1)
        messages = [{"role": "user", "content": _word(0)}, {"role": "assistant", "content": word}]
        return self._render(messages, (), {}, add_generation_prompt=False).rpartition(word)[2]

    def names(self, argument: str) -> bool:
        """Return whether the template's code has a name; its texts and strings do not count."""
        from jinja2 import Environment

        lex = Environment().lex
        return any(token[1:] == ("name", argument) for tools in (False, True) for token in lex(self._text(tools)))

    def _text(self, with_tools: bool) -> str:
        text = self._source or self._tokenizer.get_chat_template(tools=[{}] if with_tools else None)
        if "strftime_now" not in text:
            return str(text)
        if (day := self._day) is None:
            raise DataError(
                "the chat template writes the date of today, with which a resumed run would have other prompts; set "
                'tasks.chat_template_date = "YYYY-MM-DD"'
            )
        return _CLOCK.sub(lambda call: json.dumps(day.strftime(call[2])), text)

    def _render(
        self,
        messages: Messages,
        tools: Sequence[Any],
        arguments: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) or None,
                chat_template=self._text(bool(tools)),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **arguments,
            )
        except DataError:
            raise
        except Exception as error:  # templates raise jinja's errors, and their own on roles they refuse
            raise DataError(f"the chat template rejects these messages: {error}") from error
        return str(text)

    def _outline_of(self, kind: str) -> _Outline:
        roles, tools, arguments = json.loads(kind)
        messages = [
            rest | {"role": role, "content": _word(number) if has_text else ""}
            for number, (role, has_text, rest) in enumerate(roles)
        ]
        sample = self._render(messages, tools, arguments)
        words = {_word(number): number for number, (_, has_text, _) in enumerate(roles) if has_text}
        order, pieces = [], [""]
        for part in re.split(f"({_word(r'[0-9]+')})", sample):
            if part in words:
                order.append(words[part])
                pieces.append("")
            else:
                pieces[-1] += part
        times = Counter(order)
        for number in words.values():
            if times[number] != 1:
                what = "repeats" if times[number] else "drops"
                raise DataError(f"the chat template {what} the text of a message with role {roles[number][0]!r}")
        if tools:
            self._check_tools(sample, messages, tools, arguments)
        return _Outline(tuple(order), tuple(pieces))

    def _check_tools(self, sample: str, messages: Messages, tools: Sequence[Any], arguments: Mapping[str, Any]) -> None:
        names = [str(tool.get("function", tool).get("name")) for tool in tools]
        missing = [name for name in names if name not in sample]
        if missing or sample == self._render(messages, (), arguments):
            raise DataError(
                f"the chat template has no place for tools: {', '.join(missing or names)} is not written out"
            )


def _kind_of(messages: Messages, tools: Sequence[Any], arguments: Mapping[str, Any]) -> str:
    """Describe a conversation without its texts."""
    roles = [
        (m["role"], bool(m["content"].strip()), {k: v for k, v in m.items() if k not in ("role", "content")})
        for m in messages
    ]
    return json.dumps([roles, list(tools), dict(arguments)])


def _word(number: int | str) -> str:
    return f"Qt{number}sZ"


def _spans(text: str, messages: Messages, outline: _Outline) -> tuple[Span, ...] | None:
    """Return where the texts of messages are in ``text`` if it consists of them and the pieces of an outline."""
    if not text.startswith(outline.pieces[0]):
        return None
    at, spans = len(outline.pieces[0]), []
    for number, piece in zip(outline.order, outline.pieces[1:], strict=True):
        for form in _forms(messages[number]):
            if text.startswith(form + piece, at):
                break
        else:
            return None
        spans.append(Span(at, at + len(form), messages[number]["role"]))
        at += len(form) + len(piece)
    return tuple(spans) if at == len(text) else None


def _forms(message: Mapping[str, Any]) -> list[str]:
    """Return the forms in which a template may write the text of a message without changing it."""
    content = message["content"]
    forms = [content, content.strip(), content.rstrip(), content.lstrip()]
    if message["role"] == "assistant" and _THOUGHT_END in content:
        answer = content.rpartition(_THOUGHT_END)[2]
        forms += [answer, answer.lstrip("\n"), answer.strip()]
    forms += [json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1]]
    return list(dict.fromkeys(forms))
