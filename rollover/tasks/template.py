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
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, TemplateSyntaxError

from rollover.errors import DataError
from rollover.hf.tokenizer import FastTokenizer
from rollover.tasks.messages import is_text

Messages = Sequence[Mapping[str, Any]]
_CLOCK = re.compile(r"strftime_now\(\s*(['\"])([^'\"]*)\1\s*\)")
_THOUGHT_END = "</think>"
_REMEDY = "correct the template, choose another in tasks.chat_template_file, or change the row"
_MARKER = re.compile(r"<\|[^|<>\s]+\|>")


class Span(NamedTuple):
    """The place of a message's text in a written conversation."""

    start: int
    end: int
    role: str
    """Role of its message; of a text that is not its content, the key."""


class Written(NamedTuple):
    """A conversation as the template writes it."""

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class _Outline:
    """Holds what a template writes around the texts of one kind of conversation."""

    order: tuple[int, ...]
    """The texts that follow the pieces, by number."""
    pieces: tuple[str, ...]
    """One more than there are texts."""


class _Text(NamedTuple):
    role: str
    key: str
    text: str


class ChatTemplate:
    """Writes conversations out with the chat template of a tokenizer.

    Args:
        file: a template in place of the tokenizer's own.
        day: the date that the template sees.

    Raises ``DataError`` when the template cannot be read or compiled, or reads the clock and no day is given.
    """

    def __init__(self, tokenizer: FastTokenizer, *, file: Path | None = None, day: datetime.date | None = None) -> None:
        self._tokenizer = tokenizer
        self._source = None if file is None else _read(file)
        self._day = day
        self._outline = lru_cache(maxsize=256)(self._outline_of)
        for with_tools in (False, True):
            text = self._text(with_tools)
            try:
                self._apply([{"role": "user", "content": "Q"}], text)
            except TemplateSyntaxError as error:
                own = Path(tokenizer.name_or_path) / "chat_template.jinja"
                place = file or (own if own.is_file() else f"{own.with_name('tokenizer_config.json')}, chat_template")
                raise DataError(f"{place}, line {error.lineno}: {error.message}; correct the template") from None
            except Exception:  # of a template that refuses these messages
                pass

    def write(
        self, messages: Messages, *, tools: Sequence[Any] = (), arguments: Mapping[str, Any] | None = None
    ) -> Written:
        """Write a conversation out, up to the place where the assistant answers.

        Raises:
            DataError: the template refuses the conversation, changes or drops a text, or has no place for the tools.
        """
        words = map(_word, count())  # in place of the texts: all conversations of a kind are sampled as one
        sample = [{key: next(words) if is_text(m, key) else value for key, value in m.items()} for m in messages]
        outline = self._outline(json.dumps([sample, list(tools), dict(arguments or {})], default=str))
        text = self._render(messages, tools, arguments or {})
        spans = _spans(text, _texts(messages), outline)
        if spans is None:
            raise DataError(_rewrites(text, _texts(messages)))
        return Written(text, spans)

    def after_reply(self) -> str:
        """Return what the template writes after an assistant's turn, which ends with the conversation."""
        word = _word(1)
        messages = [{"role": "user", "content": _word(0)}, {"role": "assistant", "content": word}]
        return self._render(messages, (), {}, add_generation_prompt=False).rpartition(word)[2]

    def findings(self, is_marker: Callable[[str], bool]) -> list[str]:
        """Say what is unusual about the template: markers of another model, or a prompt without the beginning of the
        assistant's turn. ``is_marker`` tells whether the tokenizer knows a marker."""
        question, reply = {"role": "user", "content": _word(0)}, {"role": "assistant", "content": _word(1)}
        try:
            prompt = self._render([question], (), {}).rstrip()
            whole = self._render([question, reply], (), {}, add_generation_prompt=False)
        except DataError:  # of a template that refuses a lone question
            return []
        found = []
        if foreign := [marker for marker in dict.fromkeys(_MARKER.findall(prompt + whole)) if not is_marker(marker)]:
            found.append(f"the template's {', '.join(foreign)} is plain text to this tokenizer: is it another model's?")
        header = whole.partition(_word(1))[0].removeprefix(prompt).strip()
        if header and prompt == self._render([question], (), {}, add_generation_prompt=False).rstrip():
            found.append(f"the template writes {header!r} before a reply, but not at the end of a prompt")
        return found

    def names(self, argument: str) -> bool:
        """Return whether the template's code has a name; its texts and strings do not count."""
        return argument in self._names

    @cached_property
    def _names(self) -> frozenset[str]:
        tokens = (token for tools in (False, True) for token in Environment().lex(self._text(tools)))
        return frozenset(text for _, kind, text in tokens if kind == "name")

    def _text(self, with_tools: bool) -> str:
        try:
            text = self._source or self._tokenizer.get_chat_template(tools=[{}] if with_tools else None)
        except ValueError as error:  # several templates, and none of them is called default
            raise DataError(f"no chat template can be chosen ({error}); set tasks.chat_template_file") from None
        if "strftime_now" not in text:
            return str(text)
        if (day := self._day) is None:
            raise DataError(
                "the chat template writes the date of today, with which a resumed run would have other prompts; set "
                'tasks.chat_template_date = "YYYY-MM-DD"'
            )
        text = _CLOCK.sub(lambda call: json.dumps(day.strftime(call[2])), text)
        if re.search(r"strftime_now\s*\(", text):
            raise DataError(
                "the chat template writes the date of today in a format that it computes, where "
                "tasks.chat_template_date has no effect: change the call to strftime_now('%Y-%m-%d'), say"
            )
        return text

    def _render(
        self,
        messages: Messages,
        tools: Sequence[Any],
        arguments: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        try:
            return self._apply(
                messages,
                self._text(bool(tools)),
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                **arguments,
            )
        except DataError:
            raise
        except Exception as error:  # templates raise jinja's errors, and their own on roles they refuse
            raise DataError(f"the chat template rejects these messages: {error}") from error

    def _apply(self, messages: Messages, template: str, **arguments: Any) -> str:
        plain = [dict(message) for message in messages]
        return str(self._tokenizer.apply_chat_template(plain, chat_template=template, tokenize=False, **arguments))

    def _outline_of(self, kind: str) -> _Outline:
        messages, tools, arguments = json.loads(kind)
        sample = self._render(messages, tools, arguments)
        words = {text.text: place for place, text in enumerate(_texts(messages))}
        order, pieces = [], [""]
        for part in re.split(f"({_word(r'[0-9]+')})", sample):
            if part in words:
                order.append(words[part])
                pieces.append("")
            else:
                pieces[-1] += part
        for number, message in enumerate(messages):
            if is_text(message, "content") and (times := order.count(words[message["content"]])) != 1:
                what = "repeats" if times else "drops or changes"
                raise DataError(
                    f"the chat template {what} the text of a message with role {message['role']!r}; {_REMEDY}"
                )
            if dropped := [key for key in message if self._drops(key, number, messages, sample, tools, arguments)]:
                raise DataError(
                    f"the chat template drops {', '.join(map(repr, dropped))} of message {number + 1}, whose role is"
                    f" {message['role']!r}: move it into the content, or delete it"
                )
        if tools:
            self._check_tools(sample, messages, tools, arguments)
        return _Outline(tuple(order), tuple(pieces))

    def _drops(
        self, key: str, number: int, messages: Messages, sample: str, tools: Sequence[Any], arguments: Mapping[str, Any]
    ) -> bool:
        """Return whether a key of a message, beside its content and calls, is not in a sample. Many templates leave out
        old thoughts, so that one which would write the key in a last turn of the assistant does not drop it."""
        message = messages[number]
        if key in ("content", "tool_calls"):
            return False
        if is_text(message, key):
            if message[key] in sample or message["role"] != "assistant":
                return message[key] not in sample
            last = [{"role": "user", "content": "Q"}, message]
            return message[key] not in self._render(last, (), arguments, add_generation_prompt=False)
        if not (message[key] and isinstance(message[key], (list, dict))):
            return False
        without = [*messages[:number], {k: v for k, v in message.items() if k != key}, *messages[number + 1 :]]
        try:
            return self._render(without, tools, arguments) == sample
        except DataError:  # it needs the key
            return False

    def _check_tools(self, sample: str, messages: Messages, tools: Sequence[Any], arguments: Mapping[str, Any]) -> None:
        names = [str(tool.get("function", tool).get("name")) for tool in tools]
        missing = [name for name in names if name not in sample]
        if missing or sample == self._render(messages, (), arguments):
            raise DataError(
                f"the chat template has no place for tools: {', '.join(missing or names)} is not written out"
            )


def _texts(messages: Messages) -> list[_Text]:
    return [_Text(m["role"], key, m[key]) for m in messages for key in m if is_text(m, key)]


def _word(number: int | str) -> str:
    return f"Qt{number}sZ"


def _spans(text: str, texts: Sequence[_Text], outline: _Outline) -> tuple[Span, ...] | None:
    """Return where the texts of messages are in ``text`` if it consists of them and the pieces of an outline."""
    if not text.startswith(outline.pieces[0]):
        return None
    at, spans = len(outline.pieces[0]), []
    for place, piece in zip(outline.order, outline.pieces[1:], strict=True):
        role, key, _ = texts[place]
        for form in _forms(texts[place]):
            if text.startswith(form + piece, at):
                break
        else:
            return None
        spans.append(Span(at, at + len(form), role if key == "content" else key))
        at += len(form) + len(piece)
    return tuple(spans) if at == len(text) else None


def _rewrites(written: str, texts: Sequence[_Text]) -> str:
    """Say what a template does to the first text that it did not write as it is."""
    for each in texts:
        if not any(form in written for form in _forms(each)):
            role, key, text = each
            kept = bisect_left(range(len(text)), True, key=lambda size: text[: size + 1] not in written)
            return (
                f"the chat template changes the {key} of a message with role {role!r}: of {len(text)} characters it"
                f" writes the first {kept}, and leaves out or changes {text[kept : kept + 20]!r}; {_REMEDY}"
            )
    return "the chat template takes the text of a message for structure; change the text, or the template"


def _forms(text: _Text) -> list[str]:
    """Return the forms in which a template may write a text without changing it."""
    whole = text.text
    forms = [whole, whole.strip(), whole.rstrip(), whole.lstrip(), whole.strip("\n")]
    if text.role == "assistant" and text.key == "content" and _THOUGHT_END in whole:
        answer = whole.rpartition(_THOUGHT_END)[2]
        forms += [answer, answer.lstrip("\n"), answer.strip()]
    forms += [json.dumps(whole)[1:-1], json.dumps(whole, ensure_ascii=False)[1:-1]]
    return list(dict.fromkeys(forms))


def _read(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"tasks.chat_template_file: {file} cannot be read ({error}); correct the path") from None
    if not text.strip():
        raise DataError(f"tasks.chat_template_file: {file} is blank; correct the path")
    return text
