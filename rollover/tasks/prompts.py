"""Turns what a row asks into token ids, once and for all, and proves that the ids say what the row says.

``Prompt.text`` is exactly the string that was tokenised. A chat template writes its own special tokens, so after it the
tokenizer adds none; plain text gets those the tokenizer adds by itself (a leading BOS, say). Three laws hold for every
prompt that a template wrote:

* the text of each message is in it once and whole, apart from white space at its ends;
* the markers among its ids, such as ``<|im_end|>``, are the ones the template writes: a marker that a message spells
  out is encoded as text;
* a prompt in which no message spells a marker out has the ids of the whole text, as in any other library.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

from rollover.errors import DataError
from rollover.hf.markers import Markers, markers_of
from rollover.hf.tokenizer import FastTokenizer
from rollover.tasks.config import TasksConfig
from rollover.tasks.messages import Question, is_text
from rollover.tasks.template import ChatTemplate, Span, Written

_OWN_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Markers that an assistant writes itself, and that therefore stay markers in its turns."""


class Encoded(NamedTuple):
    """A prompt as it was written out, and its token ids."""

    text: str
    token_ids: tuple[int, ...]


class PromptEncoder:
    """Writes prompts out and tokenises them. Raises ``DataError`` when a needed chat template is missing or cannot be
    used.

    Args:
        arguments: arguments of the chat template, in addition to ``tasks.chat_template_kwargs``.
        tools: descriptions of tools that the chat template offers with every prompt.
    """

    def __init__(
        self,
        tokenizer: FastTokenizer,
        config: TasksConfig,
        arguments: Mapping[str, Any] | None = None,
        tools: tuple[Any, ...] = (),
    ) -> None:
        file = config.chat_template_file
        has_template = bool(file or tokenizer.chat_template)
        if not has_template and config.chat_template == "on":
            raise DataError("tasks.chat_template = 'on', but the tokenizer has no chat template; set it to 'off'")
        for key in ("system_prompt", "chat_template_date"):
            if not has_template and getattr(config, key) is not None:
                raise DataError(f"tasks.{key} needs a tokenizer with a chat template; omit it")
        self._tokenizer = tokenizer
        self._config = config
        self._arguments = {**config.chat_template_kwargs, **(arguments or {})}
        self._tools = tools
        self._template: ChatTemplate | None = None
        if has_template and config.chat_template != "off":
            day = config.chat_template_date
            day_seen = None if day is None else datetime.date.fromisoformat(day)
            self._template = ChatTemplate(tokenizer, file=Path(file) if file else None, day=day_seen)
        self._check_arguments(self._arguments, "tasks.chat_template_kwargs")

    @property
    def max_tokens(self) -> int:
        return self._config.max_prompt_tokens

    @property
    def turn_end(self) -> int | None:
        """Return the marker that ends an assistant's turn; ``None`` without a template, or if it writes none."""
        return None if self._template is None else self._markers.starting(self._template.after_reply())

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def findings(self) -> list[str]:
        """Say what is unusual about the chat template, if there is one."""
        return [] if self._template is None else self._template.findings(lambda text: bool(self._markers.find(text)))

    @cached_property
    def _markers(self) -> Markers:
        return markers_of(cast(Any, self._tokenizer))

    def answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        *,
        tools: Sequence[Any] = (),
        where: str,
    ) -> tuple[int, ...]:
        """Tokenise messages that follow an assistant's turn: the end of that turn, the messages, and the beginning of
        the next turn. A marker that a message spells out is encoded as text. Without a template, the texts alone.

        Raises:
            DataError: the template refuses, drops or changes a message, or a marker in it cannot be text.
        """
        if self._template is None:
            text = "".join(message["content"] for message in messages)
            plain = self._markers.encode(text, self._markers.find(text))
            if plain is None:
                raise DataError(
                    f"{where}: a text spells out a marker, which cannot be written as text: {text!r:.80}; leave it out"
                )
            return tuple(plain)
        self._check_structure(messages, tools, where)
        before = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "R"}]
        try:
            written = self._template.write(
                [*before, *messages], tools=(*self._tools, *tools), arguments={**self._arguments, **arguments}
            )
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        end = next(span.end for span in written.spans if span.role == "assistant")
        spans = tuple(Span(s.start - end, s.end - end, s.role) for s in written.spans if s.start >= end)
        rest = Written(written.text[end:], spans)
        ids = self._tokenizer([rest.text], add_special_tokens=False)["input_ids"][0]
        return tuple(self._proved(ids, rest, where))

    def _check_structure(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], where: str) -> None:
        structure = [{k: v for k, v in m.items() if k != "role" and not is_text(m, k)} for m in messages]
        if self._markers.find(json.dumps([tools, structure], default=str)):
            raise DataError(f"{where}: a tool or a tool call spells out a marker of the tokenizer; rename it")

    def fits(self, token_ids: Sequence[int], where: str) -> bool:
        """Return whether a prompt is short enough. Raises ``DataError`` when it is not and ``long_prompts`` is
        ``"error"``."""
        fits = len(token_ids) <= self.max_tokens
        if not fits and self._config.long_prompts == "error":
            raise DataError(
                f"{where}: the prompt has {len(token_ids)} tokens, tasks.max_prompt_tokens is "
                f"{self.max_tokens}; set tasks.long_prompts = 'skip', or raise it before the run begins"
            )
        return fits

    def encode(self, question: Question, *, where: str) -> Encoded:
        """Tokenise one prompt."""
        return self.encode_many([(question, where)])[0]

    def encode_many(self, questions: Sequence[tuple[Question, str]]) -> list[Encoded]:
        """Tokenise (question, where) pairs in one call, which fast tokenizers do in parallel.

        Raises:
            DataError: a prompt is empty, or breaks one of the laws.
        """
        if self._template is None:
            texts = [self._plain(question, where) for question, where in questions]
            ids = self._tokenizer(texts, add_special_tokens=True)["input_ids"]
            bos = getattr(self._tokenizer, "bos_token_id", None)  # put before each text, even one that begins with it
            found = [one[1:] if list(one[:2]) == [bos, bos] else one for one in ids]
        else:
            written = [self._write(question, where) for question, where in questions]
            texts = [one.text for one in written]
            ids = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
            found = [self._proved(one, w, where) for one, w, (_, where) in zip(ids, written, questions, strict=True)]
        for one, (_, where) in zip(found, questions, strict=True):
            if not one:
                raise DataError(f"{where}: the prompt is empty")
        return [Encoded(text, tuple(one)) for text, one in zip(texts, found, strict=True)]

    def _plain(self, question: Question, where: str) -> str:
        if question.tools or question.arguments:
            raise DataError(f"{where}: tools and template arguments need a chat template; leave them out")
        if isinstance(question.content, list):
            raise DataError(
                f"{where}: the prompt is a list of messages, which needs a chat template; use a "
                "tokenizer that has one and chat_template = 'auto' or 'on', or a column of plain text"
            )
        return str(question.content) + self._config.prompt_suffix

    def _write(self, question: Question, where: str) -> Written:
        assert self._template is not None
        content = question.content
        messages = [*map(dict, content)] if isinstance(content, list) else [{"role": "user", "content": content}]
        if self._config.prompt_suffix:
            if messages[-1]["role"] != "user":
                raise DataError(f"{where}: tasks.prompt_suffix needs a last message of plain text by the user")
            messages[-1]["content"] += self._config.prompt_suffix
        if self._config.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._config.system_prompt})
        self._check_arguments(question.arguments, f"{where}, chat_template_kwargs")
        tools = (*self._tools, *question.tools)
        self._check_structure(messages, tools, where)
        try:
            written = self._template.write(messages, tools=tools, arguments={**self._arguments, **question.arguments})
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        calls: list[Mapping[str, Any]] = [call for m in messages for call in m.get("tool_calls") or ()]
        names = [str(call.get("function", call).get("name", "")) for call in calls]
        if dropped := [name for name in names if name not in written.text]:
            raise DataError(f"{where}: the chat template leaves out the call of the tool {dropped[0]!r}")
        return written

    def _proved(self, ids: Sequence[int], written: Written, where: str) -> Sequence[int]:
        """Return ids whose markers are the template's."""
        expected = self._expected_marks(written)
        if self._markers.count(ids) == expected:
            return ids
        literal = [
            found
            for span in written.spans
            for found in self._markers.find(written.text, span.start, span.end)
            if span.role != "assistant" or written.text[slice(*found)] not in _OWN_MARKERS
        ]
        cut = self._markers.encode(written.text, literal)
        if cut is None or self._markers.count(cut) != expected:
            raise DataError(
                f"{where}: the prompt cannot be written without a marker of the tokenizer that is not the template's;"
                " leave the row out"
            )
        return cut

    def _expected_marks(self, written: Written) -> Counter[int]:
        """Count the markers that the template spells out between the texts, and the markers of the assistant itself."""
        text, at = written.text, 0
        spelled: list[str] = []
        for span in written.spans:
            spelled += [text[slice(*found)] for found in self._markers.find(text, at, span.start)]
            if span.role == "assistant":
                own = [text[slice(*found)] for found in self._markers.find(text, span.start, span.end)]
                spelled += [marker for marker in own if marker in _OWN_MARKERS]
            at = span.end
        spelled += [text[slice(*found)] for found in self._markers.find(text, at)]
        return Counter(self._markers.id_of(marker) for marker in spelled)

    def _check_arguments(self, arguments: Mapping[str, Any], key: str) -> None:
        for name, value in arguments.items():
            if self._template is None:
                raise DataError(f"{key}.{name} needs a chat template; omit it")
            if name in ("messages", "tools", "add_generation_prompt"):
                raise DataError(f"{key}.{name} is given to every chat template by Rollover; omit it")
            if not self._template.names(name):
                raise DataError(f"{key}.{name}: the chat template reads no argument of this name; omit it")
            if isinstance(value, str) and value.lower() in ("true", "false"):
                raise DataError(f"{key}.{name} is the text {value!r}, which templates take for true; omit the quotes")
            if found := self._markers.find(text := json.dumps(value, ensure_ascii=False)):
                raise DataError(
                    f"{key}.{name} holds the marker {text[slice(*found[0])]!r}, which the template would write"
                )


class RowEncoder(PromptEncoder):
    """Writes out the rows of a source whose prompts are the environment's: texts without tokens."""

    def encode_many(self, questions: Sequence[tuple[Question, str]]) -> list[Encoded]:
        return [Encoded(found.text, ()) for found in super().encode_many(questions)]

    def encode_whole(self, question: Question, *, where: str) -> Encoded:
        """Tokenise a prompt to which the environment has added its part."""
        return super().encode_many([(question, where)])[0]
