"""verl's prompts by number, as its trainer hands them over or is asked for more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollover.errors import DataError
from rollover.types import Prompt

Row = Mapping[str, Any]
"""A prompt of verl: its ``uid``, ``raw_prompt`` and the columns of its dataset."""


def rows_of(batch: Any) -> list[Row]:
    """Return the rows of a tensor dictionary of verl, also where a value is the same for all."""
    return [{key: _at(value, place) for key, value in batch.items()} for place in range(len(batch))]


def _at(value: Any, place: int) -> Any:
    if type(value).__name__ == "NonTensorData":
        return value.data
    item = value[place]
    return item.data if type(item).__name__ == "NonTensorData" else item


class VerlRows:
    """Implements ``Source`` over the prompts that verl's trainer submits.

    Args:
        encode: the ids of a prompt, in the model's chat template.
        refill: has the trainer submit so many more, which then come through ``add``.
        chunk: how many it can submit at a time.

    Example: after ``rows.add(batch)`` of 32 prompts ``rows.prompt(31)`` is the last of them, and ``rows.prompt(32)``
    asks the trainer for more.
    """

    def __init__(
        self, encode: Callable[[Any], list[int]], refill: Callable[[int], object] | None, *, chunk: int
    ) -> None:
        self._encode = encode
        self._refill = refill
        self._chunk = chunk
        self._rows: dict[str, Row] = {}
        """By ``uid``, until they are trained or dropped."""
        self._uids: list[str] = []

    def add(self, batch: Any) -> None:
        """Take over prompts in their order."""
        for row in rows_of(batch):
            uid = str(row["uid"])
            self._rows[uid] = row
            self._uids.append(uid)

    def row(self, prompt: Prompt) -> Row:
        return self._rows[prompt.columns["uid"]]

    def forget(self, prompt: Prompt) -> None:
        """Let go of a prompt that was trained or dropped."""
        self._rows.pop(prompt.columns["uid"], None)

    def prompt(self, index: int) -> Prompt:
        """Return the prompt with this number. Raises ``DataError`` when the trainer has no more."""
        while index >= len(self._uids):
            before = len(self._uids)
            if self._refill is not None:
                self._refill(self._chunk)
            if len(self._uids) == before:
                raise DataError(
                    f"a rollout needs prompt {index}, and verl's trainer has submitted {before}: its refill gave none"
                )
        uid = self._uids[index]
        messages = self._rows[uid]["raw_prompt"]
        return Prompt(
            prompt_id=f"verl/{index}@0",
            token_ids=tuple(self._encode(list(messages))),
            text=str(messages),
            source="verl",
            columns={"uid": uid},
        )
