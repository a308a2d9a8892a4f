"""Makes supervised examples: a prompt with the response it should have had.

For reasoning-gym tasks the response is a worked solution made from the item. For datasets it is the assistant's turn
that ends the messages, where they end with one, and else the answer column.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from rollover.tasks.prompt_source import PromptSource


def examples(
    source: PromptSource, tokenizer: Any, *, bare_answers: float = 0.0
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (prompt ids, response ids) without end. Responses end with the end token; of a share ``bare_answers`` of
    them only the last line is left, spread evenly over the examples."""
    for index in count():
        prompt = source.prompt(index)
        text = source.solution(prompt)
        if _spread(index) < bare_answers:
            text = text.rsplit("\n", 1)[-1]
        response = tokenizer([text], add_special_tokens=False)["input_ids"][0]
        yield prompt.token_ids, (*response, tokenizer.eos_token_id)


def _spread(index: int) -> float:
    """Give a point of [0, 1) such that all fill it evenly however long the sequence (Weyl, golden ratio), out of step
    with any mixture."""
    return index * 0.6180339887498949 % 1.0
