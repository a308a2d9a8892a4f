"""Draws prompts from datasets: ``prompt(index)`` is a pure function of (configuration, seed, index).

So one integer, the number of prompts drawn, is the whole state of a source and a restart goes on exactly
where it was. Draw ``index`` of a finite source is row ``order[index % rows]`` of epoch ``index // rows``,
each epoch with an order of its own; a dataset without end never repeats a row. Rows whose
prompt is too long, or held out for evaluation, are no rows: finite sources leave them out before they count,
endless ones take another row in their place.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from rollover.environments.rewards.base import RewardSpec
from rollover.errors import DataError
from rollover.tasks.columns import ColumnMap
from rollover.tasks.prompts import Encoded, PromptEncoder
from rollover.tasks.rows import DatasetRows
from rollover.tasks.sources.base import SourceSettings
from rollover.types import Prompt

_SCAN_ROWS = 1000
"""Rows tokenised in one call while the admissible ones are counted."""
_LANE_ROWS = 2**26
_NUM_LANES = 16
"""An endless source looks for a substitute of a row that is too long in up to this many lanes of rows."""


class PromptSource(Protocol):
    """Gives prompts by number.

    Example: ``source.prompt(41)`` of a file of 20 rows is a row of the third epoch, called ``file/7@2``, say.
    """

    @property
    def num_rows(self) -> int | None:
        """Count the admissible rows of one epoch; ``None``: without end."""
        ...

    @property
    def num_skipped(self) -> int:
        """Count the rows left out so far: their prompt is longer than ``max_prompt_tokens``, or held out."""
        ...

    @property
    def reward_specs(self) -> tuple[RewardSpec, ...]:
        """Say how the prompts of this source are scored: what ``RewardScorer`` is built from."""
        ...

    def prompt(self, index: int) -> Prompt:
        """Draw prompt ``index``. Raises ``DataError`` when its row cannot be read, or has no prompt."""
        ...


@dataclass(frozen=True)
class EpochOrder:
    """Decides in which order an epoch visits the admissible rows."""

    name: str
    seed: int
    shuffle: bool

    def epoch(self, number: int, rows: Sequence[int]) -> Sequence[int]:
        if not self.shuffle:
            return rows
        shuffled = list(rows)
        random.Random(f"{self.seed}/{self.name}/{number}").shuffle(shuffled)
        return shuffled


class RowSource:
    """Draws from a finite dataset, each epoch in an order of its own."""

    def __init__(
        self,
        config: SourceSettings,
        rows: DatasetRows,
        encoder: PromptEncoder,
        order: EpochOrder,
        *,
        skip_long: bool,
        held_out: Collection[str] = (),
    ) -> None:
        self._config = config
        assert rows.num_rows is not None
        self._rows = rows
        self._num_rows = rows.num_rows
        self._encoder = encoder
        self._held_out = held_out
        self._name = order.name
        self._columns = ColumnMap(config.column_settings(), rows[0], rows.where(0))
        self._admissible = self._scan(skip_long)
        # Prompts of two epochs are asked for in turn around a boundary.
        self._order = lru_cache(maxsize=2)(lambda epoch: order.epoch(epoch, self._admissible))

    @property
    def num_rows(self) -> int:
        return len(self._admissible)

    @property
    def num_skipped(self) -> int:
        return self._num_rows - len(self._admissible)

    @property
    def reward_specs(self) -> tuple[RewardSpec, ...]:
        return (self._config.reward_spec(self._columns, self._name),)

    def prompt(self, index: int) -> Prompt:
        epoch, place = divmod(index, self.num_rows)
        row = self._order(epoch)[place]
        values, where = self._rows[row], self._rows.where(row)
        encoded = self._encoder.encode(self._columns.content(values, where), where=where)
        return Prompt(
            prompt_id=f"{self._name}/{row}@{epoch}",
            token_ids=encoded.token_ids,
            text=encoded.text,
            source=self._name,
            columns=self._columns.kept(values, where),
        )

    def _scan(self, skip_long: bool) -> array[int]:
        """Read every row once and list those that are short enough and not held out. Finds rows without the
        needed columns on the way."""
        admissible = array("q")
        num_rows, where = self._num_rows, self._rows.where
        for start in range(0, num_rows, _SCAN_ROWS):
            chunk = range(start, min(start + _SCAN_ROWS, num_rows))
            contents = [(self._columns.content(self._rows[r], self._rows.where(r)), self._rows.where(r)) for r in chunk]
            for row, encoded in zip(chunk, self._encoder.encode_many(contents), strict=True):
                if encoded.text not in self._held_out and _fits(encoded, self._encoder, skip_long, where(row)):
                    admissible.append(row)
        if not admissible:
            raise DataError(
                f"source {self._config.name!r}: each of its {num_rows} prompts is "
                + _left_out(self._encoder.max_tokens, self._held_out)
            )
        return admissible


class EndlessSource:
    """Draws from a dataset without end: prompt ``index`` is row ``index``, or another one in place of a row that is
    left out."""

    def __init__(
        self,
        config: SourceSettings,
        rows: DatasetRows,
        encoder: PromptEncoder,
        *,
        skip_long: bool,
        held_out: Collection[str] = (),
    ) -> None:
        self._config = config
        self._rows = rows
        self._held_out = held_out
        self._encoder = encoder
        self._name = config.name
        self._skip_long = skip_long
        self._skipped: set[int] = set()
        self._columns = ColumnMap(config.column_settings(), rows[0], rows.where(0))

    @property
    def num_rows(self) -> None:
        return None

    @property
    def num_skipped(self) -> int:
        return len(self._skipped)

    @property
    def reward_specs(self) -> tuple[RewardSpec, ...]:
        return (self._config.reward_spec(self._columns, self._name),)

    def prompt(self, index: int) -> Prompt:
        assert 0 <= index < _LANE_ROWS
        for lane in range(_NUM_LANES):
            row = index + lane * _LANE_ROWS
            values, where = self._rows[row], self._rows.where(row)
            encoded = self._encoder.encode(self._columns.content(values, where), where=where)
            if encoded.text not in self._held_out and _fits(encoded, self._encoder, self._skip_long, where):
                return Prompt(
                    prompt_id=f"{self._name}/{row}@0",
                    token_ids=encoded.token_ids,
                    text=encoded.text,
                    source=self._name,
                    columns=self._columns.kept(values, where),
                )
            self._skipped.add(row)
        raise DataError(
            f"source {self._config.name!r}: each of {_NUM_LANES} items in a row is "
            + _left_out(self._encoder.max_tokens, self._held_out)
        )


def _fits(encoded: Encoded, encoder: PromptEncoder, skip_long: bool, where: str) -> bool:
    fits = len(encoded.token_ids) <= encoder.max_tokens
    if not fits and not skip_long:
        raise DataError(
            f"{where}: the prompt has {len(encoded.token_ids)} tokens, tasks.max_prompt_tokens is "
            f"{encoder.max_tokens}; set tasks.long_prompts = 'skip', or raise it before the run begins"
        )
    return fits


def _left_out(max_tokens: int, held_out: Collection[str]) -> str:
    """Say why a source has nothing left, and what to do."""
    text = f"longer than {max_tokens} tokens"
    mend = "raise tasks.max_prompt_tokens or ask for smaller items"
    if held_out:
        text += " or an evaluation prompt"
        mend += ", or set tasks.keep_eval_out = false"
    return f"{text}; {mend}"
