"""Finds the columns of a dataset that are the prompt and the answer, and the columns that travel with the prompt.

This is decided once, on the first row: a single candidate is taken, and between two the user has to choose. Every later
row must contain the chosen columns; a row that does not is reported with its file and line.

Messages that end with an assistant's turn contain prompt and answer in one column, which then counts as both. That turn
is the reference unless there is an answer column too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollover.environments.columns import (
    REPLY,
    ends_with_reply,
    has_value,
    is_messages,
    is_there,
    joined,
    parsed,
    read_column,
    split_conversation,
)
from rollover.errors import DataError
from rollover.tasks.messages import Question, messages_of, read_json, read_question

PROMPT_COLUMNS = ("prompt", "question", "problem", "query", "instruction", "input", "messages", "conversations")
_SYSTEM = ("system", "system_prompt")
ALPACA = ("instruction", "input", "output")
"""Columns of Alpaca's rows: the prompt is the first two, of which the second may be blank, and the answer the third."""
ANSWER_COLUMNS = (
    "answer",
    "label",
    "ground_truth",
    "solution",
    "reward_model.ground_truth",
    "reward_spec.ground_truth",
)


class NoAnswer(DataError):
    """A row without a reference answer that a response can match, which sources leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSettings:
    """Holds what is known about a source's columns before its first row is read."""

    source: str
    """Name of the source, for messages."""
    prompt: str | tuple[str, ...] | None = None
    """The path of the prompt, or the paths of texts that make it up."""
    answer: str | None = None
    keep: tuple[str, ...] | None = None
    """Columns that travel with the prompt; ``None`` means all."""
    needs_answer: bool = False
    """True if the reward compares with a reference answer."""
    needed: tuple[str, ...] = ()
    """Columns that the reward function requires."""
    keeps_prompt: bool = False
    """True if a prompt of text travels too, for judges that read it and environments that get the row."""
    whole: bool = False
    """True if every column travels unchanged, including the prompt's."""


class ColumnMap:
    """Decides on the first row which columns of a source are the prompt and the answer, and which travel.

    Raises ``DataError`` when the first row has several candidates or lacks a column.
    """

    def __init__(self, settings: ColumnSettings, first: Mapping[str, Any], where: str) -> None:
        self._settings = settings
        self._prompt_key = f"prompt_column of source {settings.source!r}"
        self._answer_key = f"answer_column of source {settings.source!r}"
        names = [name for name in PROMPT_COLUMNS if name != ALPACA[1] or not has_value(first, ALPACA[0])]
        chosen = settings.prompt or _choose(first, names, key=self._prompt_key, where=where)
        self._may_have_input = settings.prompt is None and chosen == ALPACA[0]
        if self._may_have_input and ALPACA[1] in first:
            chosen = ALPACA[:2]
        self._paths = (chosen,) if isinstance(chosen, str) else chosen
        for path in self._paths:
            if not is_there(first, path):
                raise _lacking(first, path, key=self._prompt_key, where=where)
        self.parts = self._paths if len(self._paths) > 1 else ()
        """The paths of the texts that are joined to make the prompt."""
        self.prompt = None if self.parts else self._paths[0]
        """The path of the prompt; ``None`` if it has parts."""
        value = None if self.prompt is None else parsed(self._prompt_of(first, where))
        if isinstance(value, list):
            messages_of(value, where)
        self.replies = ends_with_reply(value)
        """True if the messages of the first row end with an assistant's turn."""
        self.answer = settings.answer
        """The path of the reference answer; ``None`` when neither the reward nor the user asks for one. It is the
        prompt's path when the answer is the reply in it."""
        if self.answer is None and self.replies and not any(has_value(first, name) for name in ANSWER_COLUMNS):
            self.answer = self.prompt
        elif self.answer is None and settings.needs_answer:
            answers = (*ANSWER_COLUMNS, ALPACA[2]) if self._paths[0] == ALPACA[0] else ANSWER_COLUMNS
            self.answer = _choose(first, answers, key=self._answer_key, where=where)
        # A name that no column has is a mistake in the function, which is reported where functions are checked.
        self._needed = tuple(name for name in settings.needed if name in first)
        self._function_key = f"reward.function of source {settings.source!r}"
        known = (*self._paths, *settings.needed) if settings.keep is None and not settings.whole else _SYSTEM
        self._unread = [name for name in _SYSTEM if name not in known]
        self.content(first, where)
        self.travelling = tuple(self.kept(first, where))
        """The columns of the first row that travel with its prompt, and the name under which functions get the reply
        if it is the reference."""
        if self.replies and self.answer == self.prompt:
            self.travelling += (REPLY,)

    def content(self, row: Mapping[str, Any], where: str) -> Any:
        """Return the prompt of a row: text, or messages without the reply that they may end with. Raises ``DataError``
        when its prompt or a column that the reward function asks for is missing."""
        for name in self._needed:
            if name not in row:  # null is a value that functions may know how to handle
                raise _lacking(row, name, key=self._function_key, where=where)
        for name in self._unread:
            if isinstance(text := row.get(name), str) and text.strip():
                raise DataError(
                    f"{where}: the model would not read column {name!r}: write it as the first message of the row, or"
                    f" name the columns to keep, without it, in keep_columns of source {self._settings.source!r}"
                )
        if self.prompt is None:
            return joined(row, self.parts, where)
        value = self._prompt_of(row, where)
        if not is_messages(content := parsed(value)):
            if self._may_have_input and isinstance(more := row.get(ALPACA[1]), str) and more.strip():
                return joined(row, ALPACA[:2], where)  # the first row left it out
            return content
        return split_conversation(parsed(read_json(value, where)) if isinstance(value, str) else content, where).prompt

    def _prompt_of(self, row: Mapping[str, Any], where: str) -> Any:
        return _require(row, self._paths[0], key=self._prompt_key, where=where)

    def question(self, row: Mapping[str, Any], where: str) -> Question:
        """Return what a row asks. Raises ``DataError`` as ``content`` does, and for media."""
        return read_question(row, self.content(row, where), where)

    def reference(self, row: Mapping[str, Any], where: str) -> str | None:
        """Return the reference answer of a row, which is the reply if there is no other; ``None`` if the source has
        none. Raises ``NoAnswer`` when the row has none."""
        if self.answer is None:
            return None
        if not has_value(row, self.answer):
            raise NoAnswer(str(_lacking(row, self.answer, key=self._answer_key, where=where)))
        value = parsed(read_column(row, self.answer))
        reply = split_conversation(value, where).reply if is_messages(value) else str(value)
        if reply is None:
            raise NoAnswer(
                f"{where}: the messages do not end with an assistant's turn, which is the reference answer of this"
                f" source; fix the row or set {self._answer_key}"
            )
        return reply

    def kept(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the columns that travel, as they come back from the journal: those wanted, the answer, and a prompt of
        messages, which reward functions get as messages."""
        if self._settings.whole:
            return dict(row)
        wanted = self._settings.keep
        for name in wanted or ():
            _require(row, name, key=f"keep_columns of source {self._settings.source!r}", where=where)
        names = set(row if wanted is None else wanted)
        if self.answer is not None:
            names.add(_top(row, self.answer))
        is_text = self.prompt is not None and isinstance(parsed(row.get(self.prompt)), str)
        if is_text and not self._settings.keeps_prompt:
            names.discard(self.prompt)
        else:
            names |= {_top(row, path) for path in self._paths}
        return {name: _as_json(row[name], name, where) for name in row if name in names}


def find_column(row: Mapping[str, Any], candidates: Sequence[str], *, key: str, where: str) -> str | None:
    """Find the only candidate that ``row`` holds; ``None`` when it holds none.

    Raises ``DataError`` when it holds several; ``key`` names the setting that chooses among them.
    """
    present = [name for name in candidates if has_value(row, name)]
    if len(present) > 1:
        raise DataError(
            f"{where}: columns {present[0]!r} and {present[1]!r} are both candidates; set {key} to one of them"
        )
    return present[0] if present else None


def _choose(row: Mapping[str, Any], candidates: Sequence[str], *, key: str, where: str) -> str:
    found = find_column(row, candidates, key=key, where=where)
    found = found or next((name for name in candidates if is_there(row, name)), None)
    if found is None:
        raise DataError(
            f"{where}: none of the columns {', '.join(candidates)} exists; "
            f"the columns are {', '.join(row) or 'none'}; set {key}"
        )
    return found


def _require(row: Mapping[str, Any], path: str, *, key: str, where: str) -> Any:
    if not has_value(row, path):
        raise _lacking(row, path, key=key, where=where)
    return read_column(row, path)


def _lacking(row: Mapping[str, Any], path: str, *, key: str, where: str) -> DataError:
    state = "null" if is_there(row, path) else "missing"
    return DataError(
        f"{where}: column {path!r} is {state}; the columns are {', '.join(row) or 'none'}; fix the row or change {key}"
    )


def _top(row: Mapping[str, Any], path: str) -> str:
    """Return the column in which a dotted path starts."""
    return path if path in row else path.split(".")[0]


def _as_json(value: Any, name: str, where: str) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where}: column {name!r} cannot travel with the prompt ({error}); "
            "convert it to text, or name the columns you need in keep_columns"
        ) from None
