"""Prompts of a TRL dataset by number. Torch-free.

Draw ``index`` is row ``order[index % rows]`` of epoch ``index // rows``, each epoch with an order of its own. So a
restart needs only a cursor. The journal has the number of the row; its columns stay with the host.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from rollover.errors import DataError
from rollover.types import Prompt

ROW = "row"
"""The column of a prompt with the number of its row in the dataset."""
_NUM_LOOKED_AT = 64
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""The memory address in an object's text, which differs in another process."""


class TableRows(Protocol):
    """A dataset with a length, whose rows are dictionaries."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Mapping[str, Any]: ...


class EncodedPrompt(NamedTuple):
    """A prompt in the form that the model receives."""

    token_ids: Sequence[int]
    text: str


class DatasetPrompts:
    """Draws prompts from the column ``prompt`` of a dataset. Implements ``Source``.

    Args:
        encode: tokenises the value of that column as TRL does.
        shuffle: each epoch in an order of its own, drawn from ``seed``; otherwise always in the order of the rows.
        max_prompt_tokens: longest prompt that leaves room for a response.
    """

    def __init__(
        self,
        rows: TableRows,
        encode: Callable[[Any], EncodedPrompt],
        *,
        seed: int,
        shuffle: bool,
        max_prompt_tokens: int,
    ) -> None:
        if not len(rows):
            raise DataError("train_dataset has no rows: give it at least one")
        self._rows = rows
        self._encode = encode
        self._seed = seed
        self._shuffle = shuffle
        self._max_prompt_tokens = max_prompt_tokens
        # Around a boundary, prompts of two epochs are asked for in turn.
        self._order = lru_cache(maxsize=2)(self._order_of)

    def prompt(self, index: int) -> Prompt:
        """Draw prompt ``index``. Raises ``DataError`` when its row has no prompt, or its prompt is too long."""
        epoch, place = divmod(index, len(self._rows))
        row = self._order(epoch)[place]
        token_ids, text = self._encoded(_columns(self._rows, row)["prompt"], row)
        return Prompt(
            prompt_id=f"train/{row}@{epoch}", token_ids=tuple(token_ids), text=text, source="train", columns={ROW: row}
        )

    def measure(self) -> None:
        """Raise ``DataError``, as ``prompt`` would later, if a row has no prompt or a prompt is too long. A token has
        at least a byte, so rows of few bytes are not tokenised: half of the room is left for the chat template."""
        for row in range(len(self._rows)):
            prompt = _columns(self._rows, row)["prompt"]
            if not prompt or 2 * len(str(prompt).encode()) > self._max_prompt_tokens:
                self._encoded(prompt, row)

    def _encoded(self, prompt: Any, row: int) -> EncodedPrompt:
        token_ids, text = self._encode(prompt)
        if not 0 < len(token_ids) <= self._max_prompt_tokens:
            raise DataError(
                f"train_dataset: the prompt of row {row} has {len(token_ids)} tokens, where 1 to"
                f" {self._max_prompt_tokens} leave room for the response: leave such rows out"
                " (train_dataset.filter(...)), lower max_completion_length, or use an engine with a longer context"
            )
        return EncodedPrompt(token_ids, text)

    def _order_of(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._rows))
        order = array("q", range(len(self._rows)))
        random.Random(f"{self._seed}/train/{epoch}").shuffle(order)
        return order


def encoder(tokenizer: Any, options: Mapping[str, Any]) -> Callable[[Any], EncodedPrompt]:
    """Return a function that tokenises a prompt as TRL does: a text, or a list of messages in the chat template.

    Args:
        tokenizer: used by one thread only, so it is not the trainer's own.
        options: of the chat template.
    """
    options = {"add_generation_prompt": True, **options}

    def encode(prompt: Any) -> EncodedPrompt:
        if isinstance(prompt, str):
            return EncodedPrompt(tokenizer(text=[prompt])["input_ids"][0], prompt)
        if not (options.get("chat_template") or tokenizer.chat_template):
            raise DataError(
                "train_dataset has messages as prompts, but the tokenizer has no chat_template: set one, or give text"
            )
        ids = tokenizer.apply_chat_template([prompt], tokenize=True, return_dict=True, **options)["input_ids"][0]
        return EncodedPrompt(ids, tokenizer.apply_chat_template(prompt, tokenize=False, **options))

    return encode


def fingerprint(rows: TableRows) -> str:
    """Return a fingerprint that distinguishes datasets: the number of rows and a hash of some of them, spread over the
    dataset, with all columns. Raises ``DataError`` if a row has no prompt."""
    num = len(rows)
    looked_at = sorted({i * (num - 1) // max(1, _NUM_LOOKED_AT - 1) for i in range(_NUM_LOOKED_AT)}) if num else []
    columns = [_columns(rows, row) for row in looked_at]
    found = json.dumps(columns, default=lambda value: _ADDRESS.sub("", str(value)), sort_keys=True)
    return f"{num} rows, {hashlib.blake2b(found.encode(), digest_size=8).hexdigest()}"


def _columns(rows: TableRows, row: int) -> dict[str, Any]:
    columns = dict(rows[row])
    if "prompt" not in columns:
        raise DataError(f"train_dataset: row {row} has no column 'prompt', which TRL takes prompts from")
    return columns
