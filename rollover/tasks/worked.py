"""Writes worked solutions of reasoning-gym items, which a supervised warm-up teaches a model to write.

A solution consists of lines of the form ``a op b = c``, one operation on two integers each, and a last line ``####
answer``, which ``reward.extract = "hashes"`` finds. Every line is true by itself and works on the question's numbers or
on earlier results, so a response is as long as its problem is deep. The answer is the result of the lines; the item's
own is never copied.

The tasks, with ``|`` for a line break::

    chain_sum   running sums            7 - 9 + 4    7 - 9 = -2 | -2 + 4 = 2 | #### 2
    products    one digit at a time     12 * 34      12 * 30 = 360 | 12 * 4 = 48 | 360 + 48 = 408 | #### 408
    gcd         Euclid's remainders     36, 24       36 % 24 = 12 | 24 % 12 = 0 | #### 12
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollover.errors import DataError

Work = tuple[list[str], int]
"""The lines, and the integer that they result in."""


def worked_solution(dataset_name: str, entry: Mapping[str, Any]) -> str:
    """Solve one item of a reasoning-gym dataset in lines joined by line breaks; none at the end.

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
    result = _OPERATIONS[op](a, b)
    return f"{a} {op} {b} = {result}", result


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
