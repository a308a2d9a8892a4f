"""Supervised examples: a prompt with the response it should have had.

For reasoning-gym tasks the response is a worked solution made from the item; for datasets it is the answer column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from rollover.errors import DataError
from rollover.tasks.columns import ANSWER_COLUMNS, find_column, read_column
from rollover.tasks.config import SourceConfig
from rollover.tasks.gym import thaw
from rollover.tasks.source import PromptSource
from rollover.tasks.worked import worked_solution
from rollover.types import Prompt


def solution(config: SourceConfig, prompt: Prompt) -> str:
    """The response ``prompt`` should have.

    Raises:
        DataError: the task has no worked solutions, or the row no answer column.
    """
    if config.kind == "reasoning_gym":
        return worked_solution(config.gym_dataset, thaw(prompt.columns))
    where = f"prompt {prompt.prompt_id}"
    column = config.answer_column or find_column(
        prompt.columns, ANSWER_COLUMNS, where=where, key=f"source {config.name!r}: answer_column"
    )
    if column is None:
        raise DataError(
            f"{where}: no column to learn from; set answer_column of source {config.name!r}"
            f" (columns: {', '.join(prompt.columns)})"
        )
    return str(read_column(prompt.columns, column))


def examples(
    source: PromptSource, configs: Sequence[SourceConfig], tokenizer: Any, *, bare_answers: float = 0.0
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(prompt ids, response ids) without end. Responses end with the end token; of a share ``bare_answers`` of them
    only the last line is left, spread evenly over the examples."""
    by_name: Mapping[str, SourceConfig] = {config.name: config for config in configs}
    for index in count():
        prompt = source.prompt(index)
        text = solution(by_name[prompt.source], prompt)
        if _spread(index) < bare_answers:
            text = text.rsplit("\n", 1)[-1]
        response = tokenizer([text], add_special_tokens=False)["input_ids"][0]
        yield prompt.token_ids, (*response, tokenizer.eos_token_id)


def _spread(index: int) -> float:
    """Points of [0, 1) that fill it evenly however long the sequence (Weyl, golden ratio), out of step with any
    mixture."""
    return index * 0.6180339887498949 % 1.0
