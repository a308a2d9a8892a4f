"""Makes supervised examples: a prompt with the response it should have had.

For reasoning-gym tasks the response is a worked solution made from the item. For datasets it is the assistant's turn
that ends the messages if there is one, and the answer column otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from rollover.errors import DataError
from rollover.tasks.prompt_source import PromptSource


def examples(
    source: PromptSource, tokenizer: Any, *, end: int, bare_answers: float = 0.0
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (prompt ids, response ids) without end. Responses end with the token ``end``; a share ``bare_answers`` of
    them, spread evenly over the examples, are cut down to their last line.

    Raises:
        DataError: a response thinks although its prompt has closed the thought.
    """
    for index in count():
        prompt = source.prompt(index)
        text = source.solution(prompt)
        if _spread(index) < bare_answers:
            text = text.rsplit("\n", 1)[-1]
        if "<think>" in text and prompt.text.rstrip().endswith("</think>"):
            raise DataError(
                f"prompt {prompt.prompt_id} ends with a closed thought, and its response thinks; set"
                " chat_template_kwargs so that the template lets the model think, or leave the thoughts out"
            )
        response = tokenizer([text], add_special_tokens=False)["input_ids"][0]
        yield prompt.token_ids, (*response, end)


def _spread(index: int) -> float:
    """Return point ``index`` of a sequence that fills [0, 1) evenly at every length (Weyl, golden ratio), out of step
    with any mixture."""
    return index * 0.6180339887498949 % 1.0
