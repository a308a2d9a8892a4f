"""``kind = "reasoning_gym"``: items that reasoning-gym generates, without end unless there is a limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rollover.environments.reasoning_gym import GymDataset, freeze, thaw
from rollover.errors import DataError
from rollover.tasks.columns import ColumnSettings
from rollover.tasks.rows import DatasetRows
from rollover.tasks.sources.base import SourceSettings
from rollover.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGymConfig(SourceSettings):
    """Takes prompts from a dataset that reasoning-gym generates.

    Example: ``ReasoningGymConfig(name="short", dataset="chain_sum", config={"max_terms": 3})`` asks
    ``... 4 - 1 - 7 =`` and the like; prompt 17 is called ``short/17@0``.
    """

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    """``"reasoning_gym"`` chooses generated items."""
    dataset: str | None = None
    """Name of the reasoning-gym dataset. Unset: ``name``."""
    config: dict[str, Any] = field(default_factory=dict)
    """Parameters of the reasoning-gym dataset, by the library's names."""

    def __post_init__(self) -> None:
        SourceSettings.__post_init__(self)
        for key in {"seed", "size"} & self.config.keys():
            mend = "use seed and tasks.eval_seed" if key == "seed" else "use limit"
            raise ValueError(f"source {self.name!r}: config.{key} is set by the run; {mend}")

    @property
    def gym_dataset(self) -> str:
        """Return the name of the dataset in reasoning-gym."""
        return self.dataset or self.name

    def open(self, seed: int) -> DatasetRows:
        return GymRows(GymDataset(self.gym_dataset, self.config, seed))

    def column_settings(self) -> ColumnSettings:
        needs_answer = any(reward.needs_answer for reward in self.all_rewards)
        return ColumnSettings(source=self.name, prompt="question", needs_answer=needs_answer, whole=True)

    def fingerprint(self) -> None:
        return None

    def solution(self, prompt: Prompt, prompt_column: str | None) -> str:
        """Solve the item step by step."""
        return worked_solution(self.gym_dataset, thaw(prompt.columns))

    def _verifier(self) -> Mapping[str, Any]:
        return {"gym_dataset": self.gym_dataset, "gym_config": self.config}


class GymRows:
    """Gives the items of a reasoning-gym dataset as rows of JSON, without end."""

    num_rows = None

    def __init__(self, dataset: GymDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, row: int) -> dict[str, Any]:
        entry: dict[str, Any] = freeze(self._dataset.entry(row))
        return entry

    def where(self, row: int) -> str:
        return f"reasoning-gym dataset {self._dataset.name!r}, item {row}"


def worked_solution(dataset_name: str, entry: Mapping[str, Any]) -> str:
    """Solve one item of reasoning-gym's ``chain_sum`` as a supervised warm-up teaches it: lines of the form ``a op b =
    c``, each true by itself, and a last line ``#### answer``, which is their result and never copied from the item.

    Example: ``7 - 9 + 4`` is solved by the lines ``7 - 9 = -2``, ``-2 + 4 = 2`` and ``#### 2``.

    Raises:
        DataError: no solutions are known for the dataset.
    """
    if dataset_name != "chain_sum":
        raise DataError(
            f"the reasoning-gym dataset {dataset_name!r} has no worked solutions to warm up on; only 'chain_sum' has"
        )
    first, *rest = entry["metadata"]["expression"].split()
    lines, value = [], int(first)
    for op, term in zip(rest[::2], map(int, rest[1::2]), strict=True):
        lines.append(f"{value} {op} {term} = {apply(op, value, term)}")
        value = apply(op, value, term)
    return "\n".join([*lines, f"#### {value}"])


def apply(op: str, a: int, b: int) -> int:
    """Return the result of an operation."""
    return _OPERATIONS[op](a, b)


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "%": lambda a, b: a % b,
}
