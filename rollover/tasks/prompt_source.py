"""Draws prompts from datasets: ``prompt(index)`` is a pure function of (configuration, seed, index).

So one integer, the number of prompts drawn, is the whole state of a source, and a restart continues exactly where it
was. Draw ``index`` of a finite source is row ``order[index % rows]`` of epoch ``index // rows``, each epoch with an
order of its own; a dataset without end never repeats a row. Rows whose prompt is too long, or held out for evaluation,
do not count as rows: finite sources leave them out before they count, and endless ones take another row in their place.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from math import inf
from types import MappingProxyType
from typing import Any, Protocol, cast

from rollover.environments.rewards.base import RewardSpec
from rollover.errors import DataError
from rollover.hf.markers import markers_of
from rollover.hf.tokenizer import FastTokenizer
from rollover.tasks.columns import ColumnMap, NoAnswer
from rollover.tasks.messages import Question, asked
from rollover.tasks.prompts import PromptEncoder
from rollover.tasks.rows import DatasetRows
from rollover.tasks.sources.base import SourceSettings
from rollover.types import Prompt

_SCAN_ROWS = 1000
"""Rows tokenised in one call while the admissible ones are counted."""
_HELD_OUT = "an evaluation prompt"
_NO_ANSWER = "without a reference answer that a response can match"
_LANE_ROWS = 2**26
_NUM_LANES = 16
"""An endless source looks for a substitute of a row that is too long in up to this many lanes of rows."""


class PromptSource(Protocol):
    """Gives prompts by number."""

    @property
    def reward_specs(self) -> tuple[RewardSpec, ...]:
        """Return how the prompts of this source are scored, from which ``RewardScorer`` is built."""
        ...

    @property
    def left_out(self) -> str:
        """Return which rows are left out, in words; empty if none is, or their number is not known."""
        ...

    def prompt(self, index: int) -> Prompt:
        """Draw prompt ``index``. Raises ``DataError`` when its row cannot be read or has no prompt."""
        ...

    def solution(self, prompt: Prompt) -> str:
        """Return the response that a prompt of this source should have. Raises ``DataError`` when the task has no
        worked solutions, or the row neither reply nor answer."""
        ...


class _DatasetSource:
    """The common part of the sources of one dataset: its rows become prompts, unless they are left out.

    Args:
        name: of the source in prompt ids and metrics.
        held_out: texts that ``asked`` returns of prompts that are left out.
        teaches: whether each row must have a response to learn.
    """

    def __init__(
        self,
        config: SourceSettings,
        rows: DatasetRows,
        encoder: PromptEncoder,
        *,
        name: str,
        held_out: Collection[str] = (),
        teaches: bool = False,
    ) -> None:
        self._config = config
        self._teaches = teaches
        self._rows = rows
        self._encoder = encoder
        self._name = name
        self._held_out = held_out
        self._causes = Counter[str]()
        self._first_fault = ""
        self._columns = ColumnMap(config.column_settings(), rows[0], rows.where(0))

    @property
    def reward_specs(self) -> tuple[RewardSpec, ...]:
        return self._config.reward_specs(self._columns, self._name)

    @property
    def left_out(self) -> str:
        return ""

    @property
    def reply(self) -> str:
        """Return what becomes of the turn that ends the messages, in words; empty if it is not the assistant's."""
        if not self._columns.replies:
            return ""
        also = "the reference answer and " * (self._columns.answer == self._columns.prompt)
        return f"the assistant's last turn is {also}what sft teaches, and not in the prompt"

    def references(self, prompt: Prompt) -> list[str]:
        """Return the right answers to a prompt; none if there is no reference answer."""
        return self._config.references(self._columns, prompt.columns, f"prompt {prompt.prompt_id}")

    def solution(self, prompt: Prompt) -> str:
        return self._config.solution(prompt, self._columns.prompt)

    def _read(self, row: int, epoch: int) -> tuple[Question, Prompt]:
        values, where = self._rows[row], self._rows.where(row)
        question = self._columns.question(values, where)
        encoded = self._encoder.encode(question, where=where)
        return question, Prompt(
            prompt_id=f"{self._name}/{row}@{epoch}",
            token_ids=encoded.token_ids,
            text=encoded.text,
            source=self._name,
            columns=self._columns.kept(values, where),
        )

    def _admits(self, values: Mapping[str, Any], question: Question, token_ids: Sequence[int], where: str) -> bool:
        """Return whether a row is short enough, not held out and has an answer, and count why not."""
        cause = ""
        if self._held_out and asked(question) in self._held_out:
            cause = _HELD_OUT
        elif not self._encoder.fits(token_ids, where):
            cause = f"longer than {self._encoder.max_tokens} tokens"
        else:
            try:
                self._config.references(self._columns, values, where)
                if self._teaches and self._config.environment is None:
                    row = Prompt(prompt_id=where, token_ids=(), text="", source=self._name, columns=values)
                    self.solution(row)
            except NoAnswer as error:
                cause, self._first_fault = _NO_ANSWER, self._first_fault or f"; {error}"
        self._causes.update([cause] if cause else [])
        return not cause

    def _nothing_left(self, what: str) -> DataError:
        """Return the error that says why nothing is left of a source, and what to do."""
        is_long = bool(self._causes.keys() - {_HELD_OUT, _NO_ANSWER})
        mends = ["raise tasks.max_prompt_tokens or ask for smaller items"] * is_long
        mends += ["set tasks.keep_eval_out = false"] * (_HELD_OUT in self._causes)
        told = [f"source {self._config.name!r}: {what} is {self._reason()}", *[", or ".join(mends)] * bool(mends)]
        return DataError("; ".join(told))

    def _reason(self) -> str:
        causes = self._causes.items()
        told = " or ".join(f"{cause} ({times})" if len(causes) > 1 else cause for cause, times in causes)
        return told + self._first_fault


class RowSource(_DatasetSource):
    """Draws from the first ``num_rows`` rows of a dataset, each epoch in an order of its own if ``shuffle`` says so."""

    def __init__(
        self,
        config: SourceSettings,
        rows: DatasetRows,
        encoder: PromptEncoder,
        *,
        num_rows: int,
        seed: int,
        shuffle: bool,
        **common: Any,
    ) -> None:
        super().__init__(config, rows, encoder, **common)
        self._seed = seed
        self._shuffle = shuffle
        self.num_given = num_rows
        """Number of rows, including rows that are left out."""
        self._admissible = self._scan(num_rows)
        # Around a boundary, prompts of two epochs are asked for in turn.
        self._order = lru_cache(maxsize=2)(self._order_of)

    @property
    def num_rows(self) -> int:
        """Count the admissible rows, which make up one epoch."""
        return len(self._admissible)

    @property
    def left_out(self) -> str:
        what = f"leaves out {self._causes.total()} of {self.num_given} rows, each {self._reason()}"
        return f"source {self._name!r} {what}" if self._causes else ""

    def prompt(self, index: int) -> Prompt:
        epoch, place = divmod(index, self.num_rows)
        return self._read(self._order(epoch)[place], epoch)[1]

    def asked(self) -> Iterator[str]:
        """Yield the text by which each prompt is compared with others."""
        return (asked(self._columns.question(self._rows[row], self._rows.where(row))) for row in self._admissible)

    def _order_of(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return self._admissible
        shuffled = list(self._admissible)
        random.Random(f"{self._seed}/{self._name}/{epoch}").shuffle(shuffled)
        return shuffled

    def _scan(self, num_rows: int) -> array[int]:
        """Read every row once and list the rows that can be used. Finds rows without the needed columns on the way."""
        admissible = array("q")
        for start in range(0, num_rows, _SCAN_ROWS):
            chunk = range(start, min(start + _SCAN_ROWS, num_rows))
            places = [(self._rows[r], self._rows.where(r)) for r in chunk]
            questions = [(self._columns.question(values, where), where) for values, where in places]
            encoded = self._encoder.encode_many(questions)
            for row, (values, where), (question, _), found in zip(chunk, places, questions, encoded, strict=True):
                if self._admits(values, question, found.token_ids, where):
                    admissible.append(row)
        if not admissible:
            raise self._nothing_left(f"each of its {num_rows} prompts")
        return admissible


class EndlessSource(_DatasetSource):
    """Draws from a dataset without end: prompt ``index`` is row ``index``, or another one in place of a row that is
    left out."""

    def prompt(self, index: int) -> Prompt:
        assert 0 <= index < _LANE_ROWS
        self._causes.clear()
        self._first_fault = ""
        for row in range(index, index + _NUM_LANES * _LANE_ROWS, _LANE_ROWS):
            question, prompt = self._read(row, epoch=0)
            if self._admits(prompt.columns, question, prompt.token_ids, self._rows.where(row)):
                return prompt
        raise self._nothing_left(f"each of {_NUM_LANES} items in a row")


Example = tuple[tuple[int, ...], tuple[int, ...]] | tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...]]
"""Prompt ids and response ids; for an episode also whether each response token is the model's own."""


class Lesson(Protocol):
    """Shows how an episode goes on a prompt."""

    def example(self, prompt: Prompt, *, is_bare: bool) -> Example:
        """Return all turns and the answers between them; with ``is_bare``, the last turn alone."""
        ...


def examples(
    source: PromptSource,
    tokenizer: FastTokenizer,
    *,
    end: int,
    bare_answers: float = 0.0,
    lessons: Mapping[str, Lesson] = MappingProxyType({}),
    context: float = inf,
) -> Iterator[Example]:
    """Yield (prompt ids, response ids) without end. Responses end with the token ``end``; a share ``bare_answers`` of
    them, spread evenly over the examples, are cut down to their last line. ``lessons``: by source, in place of
    solutions. ``context``: the most tokens that the model reads at once.

    Raises:
        DataError: a response thinks although its prompt has closed the thought, or is too long for the model.
    """
    for index in count():
        prompt, is_bare = source.prompt(index), _spread(index) < bare_answers
        if prompt.source in lessons:
            example = lessons[prompt.source].example(prompt, is_bare=is_bare)
        else:
            example = _solved(prompt, source, tokenizer, end=end, is_bare=is_bare)
        if (num_tokens := len(example[0]) + len(example[1])) > context:
            raise DataError(
                f"prompt {prompt.prompt_id} and the response to learn have {num_tokens} tokens, but the model's context"
                f" holds {context}: shorten the response, leave the row out, or use a model with a longer context"
            )
        yield example


def _solved(prompt: Prompt, source: PromptSource, tokenizer: FastTokenizer, *, end: int, is_bare: bool) -> Example:
    if not prompt.token_ids:
        raise DataError(f"prompt {prompt.prompt_id} is written by its environment; list other sources in sft.sources")
    text = source.solution(prompt)
    if is_bare:
        text = text.rsplit("\n", 1)[-1]
    if "<think>" in text and prompt.text.rstrip().endswith("</think>"):
        raise DataError(
            f"prompt {prompt.prompt_id} ends with a closed thought, and its response thinks; set"
            " chat_template_kwargs so that the template lets the model think, or leave the thoughts out"
        )
    return prompt.token_ids, reply_ids(tokenizer, text, end)


def reply_ids(tokenizer: FastTokenizer, text: str, end: int) -> tuple[int, ...]:
    """Tokenise a response, which ends with the token ``end``. An end token that the text spells out is encoded as text,
    except at the end of the text, where it is the end of the response. Other markers, such as ``<think>``, stay."""
    ends = {end, tokenizer.eos_token_id}
    ids = tokenizer([text], add_special_tokens=False)["input_ids"][0]
    if ends.isdisjoint(ids):
        return (*ids, end)
    markers = markers_of(cast(Any, tokenizer))
    spelled = [found for found in markers.find(text) if markers.id_of(text[slice(*found)]) in ends]
    while spelled and not text[spelled[-1][1] :].strip():
        text = text[: spelled.pop()[0]]
    written = markers.encode(text, spelled)
    if written is None:
        raise DataError(
            f"a response spells out an end token, which cannot be written as text: {text!r:.80}; leave it out"
        )
    return (*written, end)


def _spread(index: int) -> float:
    """Return point ``index`` of a sequence that fills [0, 1) evenly at every length (Weyl, golden ratio), out of step
    with any mixture."""
    return index * 0.6180339887498949 % 1.0
