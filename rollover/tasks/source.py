"""Where prompts come from: ``prompt(index)`` is a pure function of (configuration, seed, index).

So one integer, the number of prompts drawn, is the whole state of a source and a restart goes on exactly
where it was. Draw ``index`` of a finite source is row ``order[index % rows]`` of epoch ``index // rows``,
each epoch with an order of its own; a reasoning-gym source without a limit never repeats a row. Rows whose
prompt is too long, or held out for evaluation, are no rows: finite sources leave them out before they count,
endless ones take another row in their place.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from rollover.environments.function import function_columns
from rollover.environments.reasoning_gym import MAX_ROWS, GymDataset, freeze, gym_seed
from rollover.environments.rewards import RewardSpec, build_reward
from rollover.errors import DataError
from rollover.hf.tokenizer import Tokenizer
from rollover.tasks.columns import ColumnMap
from rollover.tasks.config import SourceConfig, TasksConfig
from rollover.tasks.mixture import MixtureSource, PromptSource
from rollover.tasks.prompts import Encoded, PromptEncoder
from rollover.tasks.rows import Rows, open_rows
from rollover.types import Prompt

__all__ = ["GymSource", "PromptSource", "RowSource", "eval_sources", "train_source"]

_SCAN_ROWS = 1000
"""Rows tokenised in one call while the admissible ones are counted."""
_LANE_ROWS = 2**26
_LANES = MAX_ROWS // _LANE_ROWS
"""An endless source looks for a substitute of a row that is too long in up to this many lanes of rows."""


class RowSource:
    """A finite source: a file, a hub dataset, or the first ``limit`` items of a reasoning-gym dataset."""

    def __init__(
        self,
        config: SourceConfig,
        rows: Rows,
        encoder: PromptEncoder,
        order: _Order,
        *,
        skip_long: bool,
        held_out: Collection[str] = (),
    ) -> None:
        self._config = config
        self._rows = rows
        self._encoder = encoder
        self._held_out = held_out
        self._name = order.name
        self._columns = ColumnMap(config, rows[0], rows.where(0), needed=function_columns(config.reward))
        self._admissible = self._scan(skip_long)
        # Prompts of two epochs are asked for in turn around a boundary.
        self._order = lru_cache(maxsize=2)(lambda epoch: order.epoch(epoch, self._admissible))

    @property
    def num_rows(self) -> int:
        return len(self._admissible)

    @property
    def num_skipped(self) -> int:
        return len(self._rows) - len(self._admissible)

    @property
    def reward_specs(self) -> tuple[RewardSpec, ...]:
        return (_reward_spec(self._config, self._columns, self._name),)

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
        """Read every row once: which are short enough and not held out? Finds rows without the needed columns on the
        way."""
        admissible = array("q")
        num_rows, where = len(self._rows), self._rows.where
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


class GymSource:
    """A reasoning-gym dataset without end: row = index."""

    def __init__(
        self,
        config: SourceConfig,
        dataset: GymDataset,
        encoder: PromptEncoder,
        *,
        name: str,
        skip_long: bool,
        held_out: Collection[str] = (),
    ) -> None:
        self._config = config
        self._dataset = dataset
        self._held_out = held_out
        self._encoder = encoder
        self._name = name
        self._skip_long = skip_long
        self._skipped: set[int] = set()
        self._columns = ColumnMap(config, dataset.entry(0), f"reasoning-gym dataset {dataset.name!r}")

    @property
    def num_rows(self) -> None:
        return None

    @property
    def num_skipped(self) -> int:
        return len(self._skipped)

    @property
    def reward_specs(self) -> tuple[RewardSpec, ...]:
        return (_reward_spec(self._config, self._columns, self._name),)

    def prompt(self, index: int) -> Prompt:
        assert 0 <= index < _LANE_ROWS
        for lane in range(_LANES):
            row = index + lane * _LANE_ROWS
            entry = self._dataset.entry(row)
            where = f"reasoning-gym dataset {self._dataset.name!r}, item {row}"
            encoded = self._encoder.encode(entry["question"], where=where)
            if encoded.text not in self._held_out and _fits(encoded, self._encoder, self._skip_long, where):
                return Prompt(
                    prompt_id=f"{self._name}/{row}@0",
                    token_ids=encoded.token_ids,
                    text=encoded.text,
                    source=self._name,
                    columns=freeze(entry),
                )
            self._skipped.add(row)
        raise DataError(
            f"source {self._config.name!r}: each of {_LANES} items in a row is "
            + _left_out(self._encoder.max_tokens, self._held_out)
        )


def train_source(
    config: TasksConfig, tokenizer: Tokenizer, *, seed: int, held_out: Collection[str] = frozenset()
) -> PromptSource:
    """The training mixture, without the prompts whose text is among ``held_out``. Raises ``DataError`` for anything
    wrong with a source."""
    if not config.train:
        raise DataError("tasks.train names no source; add one [[tasks.train]] table")
    encoder = PromptEncoder(tokenizer, config)
    sources: list[PromptSource] = []
    skip_long = config.long_prompts == "skip"
    for source in config.train:
        if source.kind == "reasoning_gym" and source.limit is None:
            dataset = GymDataset(source.gym_dataset, source.config, gym_seed("train", source.name, seed))
            sources.append(
                GymSource(source, dataset, encoder, name=source.name, skip_long=skip_long, held_out=held_out)
            )
        else:
            order = _Order(name=source.name, seed=seed, shuffle=config.shuffle)
            rows = _open_rows(source, gym_seed("train", source.name, seed), source.limit)
            sources.append(RowSource(source, rows, encoder, order, skip_long=skip_long, held_out=held_out))
    if len(sources) == 1:
        return sources[0]
    return MixtureSource(sources, [source.weight for source in config.train])


def eval_sources(config: TasksConfig, tokenizer: Tokenizer, *, num_prompts: int) -> tuple[RowSource, ...]:
    """The evaluation sets: the first ``num_prompts`` rows (or ``limit``, or all, if fewer) of each source in
    file order, less the skipped ones. Ask ``prompt(i)`` for i below ``num_rows``."""
    encoder = PromptEncoder(tokenizer, config)
    sources = []
    for source in config.eval:
        order = _Order(name=f"eval/{source.name}", seed=config.eval_seed, shuffle=False)
        limit = min(num_prompts, source.limit or num_prompts)
        rows = _open_rows(source, gym_seed("eval", source.name, config.eval_seed), limit)
        sources.append(RowSource(source, rows, encoder, order, skip_long=config.long_prompts == "skip"))
    return tuple(sources)


def held_out_texts(config: TasksConfig, evaluation: Sequence[RowSource]) -> frozenset[str]:
    """The evaluation prompts that training must not see; none when ``keep_eval_out`` is off."""
    if not config.keep_eval_out:
        return frozenset()
    return frozenset(source.prompt(i).text for source in evaluation for i in range(source.num_rows))


def _left_out(max_tokens: int, held_out: Collection[str]) -> str:
    """Why a source has nothing left, and what to do."""
    text = f"longer than {max_tokens} tokens"
    mend = "raise tasks.max_prompt_tokens or ask for smaller items"
    if held_out:
        text += " or an evaluation prompt"
        mend += ", or set tasks.keep_eval_out = false"
    return f"{text}; {mend}"


class SourceFacts(NamedTuple):
    """What is known of a source that was opened and not yet read."""

    num_rows: int | None
    """``None``: without end, or not known without a download."""
    reply: str = ""
    """What becomes of the turn that ends the messages, where an assistant's does."""
    first: Prompt | None = None
    """Where there is a tokenizer, and nothing had to be downloaded."""
    prompt_column: str = ""


def check_source(config: SourceConfig, encoder: PromptEncoder | None = None) -> SourceFacts:
    """Open the dataset and the reward function of a source and write out its first prompt, as far as nothing is
    downloaded.

    Raises:
        DataError: as a run would.
    """
    if config.kind == "reasoning_gym":
        entry = GymDataset(config.gym_dataset, config.config).entry(0)
        first = _first(config, encoder, entry["question"], config.name, freeze(entry))
        return SourceFacts(config.limit, first=first, prompt_column="question")
    if config.kind == "hf" and not Path(str(config.path)).is_dir():
        return SourceFacts(None)
    rows = open_rows(config)
    where = rows.where(0)
    columns = ColumnMap(config, rows[0], where, needed=function_columns(config.reward))
    build_reward(_reward_spec(config, columns, config.name))
    reply = ""
    if columns.replies:
        reply = "the assistant's last turn is what sft teaches, and not in the prompt"
        if columns.answer == columns.prompt:
            reply = "the assistant's last turn is the reference answer and what sft teaches, and not in the prompt"
    first = _first(config, encoder, columns.content(rows[0], where), where, columns.kept(rows[0], where))
    return SourceFacts(len(rows), reply, first, columns.prompt)


def _first(
    config: SourceConfig, encoder: PromptEncoder | None, content: Any, where: str, columns: Mapping[str, Any]
) -> Prompt | None:
    if encoder is None:
        return None
    text, token_ids = encoder.encode(content, where=where)
    return Prompt(prompt_id=f"{config.name}/0@0", token_ids=token_ids, text=text, source=config.name, columns=columns)


def _open_rows(config: SourceConfig, gym_seed: int, limit: int | None) -> Rows:
    rows: Rows
    if config.kind == "reasoning_gym":
        assert limit is not None
        return _GymRows(GymDataset(config.gym_dataset, config.config, gym_seed), limit)
    rows = open_rows(config)
    return rows if limit is None or limit >= len(rows) else _FirstRows(rows, limit)


@dataclass(frozen=True)
class _Order:
    """In which order an epoch visits the admissible rows."""

    name: str
    seed: int
    shuffle: bool

    def epoch(self, number: int, rows: Sequence[int]) -> Sequence[int]:
        if not self.shuffle:
            return rows
        shuffled = list(rows)
        random.Random(f"{self.seed}/{self.name}/{number}").shuffle(shuffled)
        return shuffled


class _FirstRows:
    def __init__(self, rows: Rows, num_rows: int) -> None:
        self._rows = rows
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._rows[row]

    def where(self, row: int) -> str:
        return self._rows.where(row)


class _GymRows:
    """The first items of a reasoning-gym dataset as rows."""

    def __init__(self, dataset: GymDataset, num_rows: int) -> None:
        self._dataset = dataset
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        entry: dict[str, Any] = freeze(self._dataset.entry(row))
        return entry

    def where(self, row: int) -> str:
        return f"reasoning-gym dataset {self._dataset.name!r}, item {row}"


def _reward_spec(config: SourceConfig, columns: ColumnMap, name: str) -> RewardSpec:
    is_gym = config.kind == "reasoning_gym"
    return RewardSpec(
        source=name,
        config=config.reward,
        gym_dataset=config.gym_dataset if is_gym else None,
        gym_config=config.config,
        prompt_column=columns.prompt,
        answer_column=columns.answer,
        columns=columns.travelling,
    )


def _fits(encoded: Encoded, encoder: PromptEncoder, skip_long: bool, where: str) -> bool:
    fits = len(encoded.token_ids) <= encoder.max_tokens
    if not fits and not skip_long:
        raise DataError(
            f"{where}: the prompt has {len(encoded.token_ids)} tokens, tasks.max_prompt_tokens is "
            f"{encoder.max_tokens}; set tasks.long_prompts = 'skip', or raise it before the run begins"
        )
    return fits
