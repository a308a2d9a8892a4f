"""Supervised examples: a prompt with the response it should have had.

For reasoning-gym tasks the response is a worked solution made from the item. For datasets it is the assistant's turn
that ends the messages, where they end with one, and else the answer column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from rollover.environments.columns import read_column, read_reply
from rollover.environments.reasoning_gym import thaw
from rollover.errors import DataError
from rollover.tasks.columns import ANSWER_COLUMNS, find_column
from rollover.tasks.config import SourceConfig
from rollover.tasks.source import PromptSource
from rollover.tasks.worked import worked_solution
from rollover.types import Prompt


class Solutions:
    """The responses that the prompts of ``source`` should have; ``configs`` are those of its parts."""

    def __init__(self, source: PromptSource, configs: Sequence[SourceConfig]) -> None:
        self._configs = {config.name: config for config in configs}
        self._prompt_columns = {spec.source: spec.prompt_column for spec in source.reward_specs}

    def of(self, prompt: Prompt) -> str:
        """Raises ``DataError`` when the task has no worked solutions, or the row neither reply nor answer."""
        return solution(self._configs[prompt.source], prompt, self._prompt_columns[prompt.source])


def solution(config: SourceConfig, prompt: Prompt, prompt_column: str | None) -> str:
    """The response that a prompt of the source ``config`` should have. Raises ``DataError`` as ``Solutions.of``."""
    if config.kind == "reasoning_gym":
        return worked_solution(config.gym_dataset, thaw(prompt.columns))
    return read_reply(prompt.columns, prompt_column) or _answer(config, prompt)


def _answer(config: SourceConfig, prompt: Prompt) -> str:
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
    solutions = Solutions(source, configs)
    for index in count():
        prompt = source.prompt(index)
        text = solutions.of(prompt)
        if _spread(index) < bare_answers:
            text = text.rsplit("\n", 1)[-1]
        response = tokenizer([text], add_special_tokens=False)["input_ids"][0]
        yield prompt.token_ids, (*response, tokenizer.eos_token_id)


def _spread(index: int) -> float:
    """Points of [0, 1) that fill it evenly however long the sequence (Weyl, golden ratio), out of step with any
    mixture."""
    return index * 0.6180339887498949 % 1.0
