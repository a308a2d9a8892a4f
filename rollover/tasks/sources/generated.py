"""``kind = "generated"``: rows that a function of the user's makes, without end unless there is a limit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rollover.environments.rewards.extraction import answer_text
from rollover.environments.user_function import import_in_run
from rollover.errors import DataError
from rollover.tasks.columns import ColumnSettings
from rollover.tasks.rows import DatasetRows
from rollover.tasks.sources.base import SourceSettings
from rollover.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedConfig(SourceSettings):
    """Takes prompts from a function of yours, which makes a row from a seed.

    Example: ``GeneratedConfig(name="boxes", function="rollover.tasks.sokoban:puzzle", params={"width": 3})`` asks for
    the solution of ``puzzle(seed, width=3)["prompt"]``; prompt 17 is called ``boxes/17@0``.
    """

    kind: Literal["generated"] = "generated"
    """``"generated"`` chooses rows that a function makes."""
    function: str
    """``"module:function"``, which is called with a seed and returns a row: a table of JSON values with ``prompt``
    (text or messages) and what reward and environment need, such as ``answer``. The same seed gives the same row."""
    params: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of ``function``."""

    def open(self, seed: int) -> DatasetRows:
        return GeneratedRows(self.function, self.params, seed)

    def column_settings(self) -> ColumnSettings:
        needs_answer = any(reward.needs_answer for reward in self.all_rewards)
        return ColumnSettings(source=self.name, prompt="prompt", needs_answer=needs_answer, whole=True)

    def fingerprint(self) -> None:
        return None

    def solution(self, prompt: Prompt, prompt_column: str | None) -> str:
        """Return the row's ``answer``."""
        if "answer" not in prompt.columns:
            raise DataError(f"prompt {prompt.prompt_id}: {self.function} returned no 'answer' to learn from")
        return answer_text(prompt.columns["answer"])


class GeneratedRows:
    """Makes row ``r`` from the seed of the source plus ``r``."""

    num_rows = None

    def __init__(self, path: str, params: Mapping[str, Any], seed: int) -> None:
        self._function: Callable[..., Any] = import_in_run(path)
        self._path, self._params, self._seed = path, params, seed

    def __getitem__(self, row: int) -> dict[str, Any]:
        try:
            made = json.loads(json.dumps(self._function(self._seed + row, **self._params)))
        except Exception as error:
            raise DataError(f"{self.where(row)}: {type(error).__name__}: {error}; correct the function") from error
        if not isinstance(made, dict):
            raise DataError(f"{self.where(row)}: a row is a table, got {type(made).__name__}; correct the function")
        return made

    def where(self, row: int) -> str:
        return f"{self._path}, seed {self._seed + row}"
