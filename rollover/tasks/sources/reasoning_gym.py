"""``kind = "reasoning_gym"``: items that reasoning-gym generates, without end unless there is a limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


Work = tuple[list[str], int]
"""The lines, and the integer that they result in."""


def worked_solution(dataset_name: str, entry: Mapping[str, Any]) -> str:
    """Solve one item of a reasoning-gym dataset as a supervised warm-up teaches it: lines of the form ``a op b = c``,
    each true by itself, and a last line ``#### answer``, which is their result and never copied from the item.

    The tasks, with ``|`` for a line break::

        chain_sum   running sums            7 - 9 + 4    7 - 9 = -2 | -2 + 4 = 2 | #### 2
        products    one digit at a time     12 * 34      12 * 30 = 360 | 12 * 4 = 48 | 360 + 48 = 408 | #### 408
        gcd         Euclid's remainders     36, 24       36 % 24 = 12 | 24 % 12 = 0 | #### 12

    ``entry`` is the item as the library made it (``question``, ``answer``, ``metadata``).

    Raises:
        DataError: no solutions are known for the dataset.
    """
    if dataset_name not in _SOLVERS:
        raise DataError(
            f"the reasoning-gym dataset {dataset_name!r} has no worked solutions to warm up on; "
            f"known: {', '.join(sorted(_SOLVERS))}"
        )
    lines, answer = _SOLVERS[dataset_name](entry["metadata"])
    return "\n".join([*lines, f"#### {answer}"])


def _chain_sum(metadata: Mapping[str, Any]) -> Work:
    first, *rest = metadata["expression"].split()
    return _fold(int(first), [(op, int(term)) for op, term in zip(rest[::2], rest[1::2], strict=True)])


def _products(metadata: Mapping[str, Any]) -> Work:
    first, *rest = (int(factor) for factor in metadata["expression"].split(" * "))
    lines, product = [], first
    for factor in rest:
        partial = [_line(product, "*", place) for place in _places(factor)]
        lines += [text for text, _ in partial]
        head, *others = (value for _, value in partial)
        added, product = _fold(head, [("+", value) for value in others])
        lines += added
    return lines, product


def _gcd(metadata: Mapping[str, Any]) -> Work:
    lines = []
    divisor, *rest = metadata["numbers"]
    for number in rest:
        larger, divisor = max(divisor, number), min(divisor, number)
        while larger % divisor:
            text, remainder = _line(larger, "%", divisor)
            lines.append(text)
            larger, divisor = divisor, remainder
        lines.append(_line(larger, "%", divisor)[0])
    return lines, divisor


def _fold(value: int, steps: Sequence[tuple[str, int]]) -> Work:
    """Apply each operation to ``value`` in turn, with a line for each."""
    lines = []
    for op, operand in steps:
        text, value = _line(value, op, operand)
        lines.append(text)
    return lines, value


def _line(a: int, op: str, b: int) -> tuple[str, int]:
    result = apply(op, a, b)
    return f"{a} {op} {b} = {result}", result


def apply(op: str, a: int, b: int) -> int:
    """Return the result of an operation.

    Example: ``apply("%", 36, 24)`` is 12.
    """
    return _OPERATIONS[op](a, b)


def _places(number: int) -> list[int]:
    """Split ``number`` into the values of its digits, from the left, without the zeros: 305 is 300 and 5."""
    sign = -1 if number < 0 else 1
    digits = str(abs(number))
    return [sign * int(d) * 10**i for d, i in zip(digits, reversed(range(len(digits))), strict=True) if d != "0"] or [0]


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "%": lambda a, b: a % b,
}
_SOLVERS: dict[str, Callable[[Mapping[str, Any]], Work]] = {
    "chain_sum": _chain_sum,
    "products": _products,
    "gcd": _gcd,
}
