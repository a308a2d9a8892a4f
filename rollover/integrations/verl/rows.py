"""verl's prompts by number, as its trainer hands them over or is asked for more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollover.errors import DataError
from rollover.integrations.verl.settings import SINGLE_TURN
from rollover.types import Prompt

Row = Mapping[str, Any]
"""A prompt of verl: its ``uid``, ``raw_prompt`` and the columns of its dataset."""


def rows_of(batch: Any) -> list[Row]:
    """Return the rows of a tensor dictionary of verl, in which one value may stand for all rows."""
    return [{key: _at(value, place) for key, value in batch.items()} for place in range(len(batch))]


def _at(value: Any, place: int) -> Any:
    if type(value).__name__ == "NonTensorData":
        return value.data
    item = value[place]
    return item.data if type(item).__name__ == "NonTensorData" else item


class VerlRows:
    """Implements ``Source`` over the prompts that verl's trainer submits.

    Args:
        encode: returns the ids of a prompt, in the model's chat template.
        group_size: responses to each prompt.
        refill: lets the trainer submit that many more, which then arrive through ``add``.
        chunk: how many it can submit at a time.
    """

    def __init__(
        self, encode: Callable[[Any], list[int]], refill: Callable[[int], object], *, group_size: int, chunk: int
    ) -> None:
        self._encode = encode
        self._group_size = group_size
        self._refill = refill
        self._chunk = chunk
        self._rows: dict[str, Row] = {}
        """Rows by ``uid``, until they are trained or dropped."""
        self._uids: list[str] = []

    def add(self, batch: Any) -> None:
        """Add prompts in their order. Raises ``DataError`` for a prompt that requires something unsupported."""
        for row in rows_of(batch):
            self._refuse(row)
            uid = str(row["uid"])
            self._rows[uid] = row
            self._uids.append(uid)

    def _refuse(self, row: Row) -> None:
        """Refuse a prompt with media, and one whose columns would make verl's own agent loop behave differently."""
        contents = [message["content"] for message in row["raw_prompt"] if isinstance(message["content"], list)]
        if row.get("multi_modal_data") or any(part["type"] != "text" for parts in contents for part in parts):
            raise DataError(
                f"prompt {row['uid']} has images or other media, and Rollover gives verl's replicas only text:"
                " choose another dataset"
            )
        for column, followed in (
            ("__rollout_n__", self._group_size),
            ("__do_sample__", True),
            ("agent_name", SINGLE_TURN),
        ):
            if (asked := row.get(column, followed)) != followed:
                raise DataError(
                    f"prompt {row['uid']}: its column {column} is {asked}, and with Rollover's replay buffer every"
                    f" prompt has {followed}: leave the column out"
                )

    def row(self, prompt: Prompt) -> Row:
        return self._rows[prompt.columns["uid"]]

    def forget(self, prompt: Prompt) -> None:
        """Delete a prompt that was trained or dropped."""
        self._rows.pop(prompt.columns["uid"], None)

    def prompt(self, index: int) -> Prompt:
        """Return the prompt with this number. Raises ``DataError`` when the trainer has no more."""
        while index >= len(self._uids):
            before = len(self._uids)
            self._refill(self._chunk)
            if len(self._uids) == before:
                raise DataError(
                    f"a rollout needs prompt {index}, and verl's trainer has submitted {before}: its refill_fn added"
                    " none"
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
