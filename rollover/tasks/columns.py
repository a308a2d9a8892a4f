"""Which column of a dataset is the prompt, which the answer, and which travel with the prompt.

Decided once, on the first row: one candidate is taken, two are the user's to choose. Every later row must
hold the chosen columns; one that does not is named with its file and line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollover.errors import DataError
from rollover.tasks.config import SourceConfig
from rollover.tasks.rewards import RewardSpec, read_column

PROMPT_COLUMNS = ("prompt", "question", "input", "messages")
ANSWER_COLUMNS = (
    "answer",
    "label",
    "ground_truth",
    "solution",
    "reward_model.ground_truth",
    "reward_spec.ground_truth",
)


class ColumnMap:
    """The columns of one source. Raises ``DataError`` when its first row leaves a choice or lacks a column."""

    def __init__(self, config: SourceConfig, first: Mapping[str, Any], where: str) -> None:
        self._config = config
        self._is_gym = config.kind == "reasoning_gym"
        self._prompt_key = f"prompt_column of source {config.name!r}"
        self._answer_key = f"answer_column of source {config.name!r}"
        prompt, answer = (
            ("question", "answer") if self._is_gym else (config.prompt_column, config.answer_column)
        )
        self._prompt = prompt or _choose(first, PROMPT_COLUMNS, key=self._prompt_key, where=where)
        self._answer: str | None = None
        if config.reward.needs_answer:
            self._answer = answer or _choose(first, ANSWER_COLUMNS, key=self._answer_key, where=where)
        elif config.answer_column is not None:
            raise DataError(
                f"{self._answer_key} has no effect with reward kind {config.reward.kind!r}: leave it out"
            )
        self._first_columns = tuple(first)
        self.content(first, where)
        self.kept(first, where)

    def content(self, row: Mapping[str, Any], where: str) -> Any:
        """The prompt of a row: text or messages. ``DataError`` when its prompt or its answer is missing."""
        if self._answer is not None:
            _require(row, self._answer, key=self._answer_key, where=where)
        return _require(row, self._prompt, key=self._prompt_key, where=where)

    def kept(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The columns that travel, as they come back from the journal: those wanted, the answer, and a prompt
        of messages, which reward functions get as messages. An entry of reasoning-gym travels whole."""
        if self._is_gym:
            return dict(row)
        wanted = self._config.keep_columns
        for name in wanted or ():
            _require(row, name, key=f"keep_columns of source {self._config.name!r}", where=where)
        names = set(row if wanted is None else wanted)
        if self._answer is not None:
            names.add(_top(row, self._answer))
        if isinstance(row.get(self._prompt), str):
            names.discard(self._prompt)
        else:
            names.add(_top(row, self._prompt))
        return {name: _as_json(row[name], name, where) for name in row if name in names}

    def reward_spec(self, source: str) -> RewardSpec:
        return RewardSpec(
            source=source,
            config=self._config.reward,
            gym_dataset=self._config.gym_dataset if self._is_gym else None,
            gym_config=self._config.config,
            prompt_column=self._prompt,
            answer_column=self._answer,
            columns=self._config.keep_columns or self._first_columns,
        )


def _choose(row: Mapping[str, Any], candidates: Sequence[str], *, key: str, where: str) -> str:
    present = [name for name in candidates if _has(row, name)]
    if len(present) > 1:
        raise DataError(
            f"{where}: columns {present[0]!r} and {present[1]!r} could both be meant; "
            f"set {key} to one of them"
        )
    if not present:
        raise DataError(
            f"{where}: none of the columns {', '.join(candidates)} is there; "
            f"the columns are {', '.join(row) or 'none'}; set {key}"
        )
    return present[0]


def _require(row: Mapping[str, Any], path: str, *, key: str, where: str) -> Any:
    if not _has(row, path):
        state = "null" if path in row else "missing"
        raise DataError(
            f"{where}: column {path!r} is {state}; the columns are {', '.join(row) or 'none'}; "
            f"mend the row or change {key}"
        )
    return read_column(row, path)


def _has(row: Mapping[str, Any], path: str) -> bool:
    try:
        return read_column(row, path) is not None
    except KeyError:
        return False


def _top(row: Mapping[str, Any], path: str) -> str:
    """The column a dotted path starts in."""
    return path if path in row else path.split(".")[0]


def _as_json(value: Any, name: str, where: str) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where}: column {name!r} cannot travel with the prompt ({error}); "
            "name the columns you need in keep_columns"
        ) from None
