"""Opens the tokenizer of a Hugging Face folder, and finds the tokens that end a response."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from rollover.errors import ModelError, parse_json

_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class FastTokenizer(Protocol):
    """The part of a fast tokenizer of transformers that is used here."""

    name_or_path: str
    chat_template: Any
    """A template, or several by name; None if there is none."""
    backend_tokenizer: Any
    """The ``tokenizers.Tokenizer`` below it."""

    eos_token_id: int
    pad_token_id: int | None

    def __len__(self) -> int: ...

    def __call__(self, text: Sequence[str], *, add_special_tokens: bool) -> Mapping[str, Any]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str: ...

    def save_pretrained(self, folder: Path) -> Any: ...

    def get_chat_template(self, *, tools: Sequence[Any] | None) -> str: ...

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **options: Any) -> Any: ...


def open_tokenizer(folder: Path) -> FastTokenizer:
    """Open the folder's fast tokenizer, as its ``tokenizer.json`` describes it: the class that transformers chooses by
    the model's type may replace the way in which text is cut into words.

    Raises ``ModelError`` when there is none, or no end token is named."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # Without its files, transformers makes up an empty tokenizer for some model types.
    if not any((folder / name).is_file() for name in _VOCABULARY_FILES):
        raise ModelError(f"{folder}: no tokenizer ({', '.join(_VOCABULARY_FILES)}); put its files next to the model")
    _listed_stop_ids(folder)
    try:
        kind = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
        tokenizer: Any = kind.from_pretrained(folder)
    except Exception as e:  # the tokenizers library raises plain Exception
        reason = (str(e) or type(e).__name__).splitlines()[0]
        raise ModelError(f"{folder}: the tokenizer cannot be loaded ({reason}); put its files next to the model") from e
    if tokenizer.eos_token_id is None:
        raise ModelError(f"{folder}: the tokenizer names no end token (eos_token in tokenizer_config.json)")
    return cast(FastTokenizer, tokenizer)


def stop_token_ids(folder: Path, tokenizer: FastTokenizer) -> tuple[int, ...]:
    """List the tokens that end a response: the tokenizer's end token, and the end tokens of the model's configs."""
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *_listed_stop_ids(folder)]))


def generation_config(folder: Path, ends: Sequence[int]) -> bytes:
    """Return the ``generation_config.json`` of a folder, with the tokens ``ends`` as those that end a response."""
    path = folder / "generation_config.json"
    if path.is_file():
        content = _read_json(path)
        content.pop("_from_model_config", None)  # transformers might read them there again
    else:  # as transformers would read them
        content = {k: v for k, v in _read_json(folder / "config.json").items() if k in ("bos_token_id", "pad_token_id")}
    return json.dumps({**content, "eos_token_id": list(ends)}, indent=2).encode()


def _listed_stop_ids(folder: Path) -> list[int]:
    ids: list[int] = []
    for path in (folder / "generation_config.json", folder / "config.json"):
        listed = _read_json(path).get("eos_token_id") if path.is_file() else None
        more = listed if isinstance(listed, list) else [] if listed is None else [listed]
        for token in more:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise ModelError(f"{path}: eos_token_id must be a token id or a list of them, got {listed!r}")
        ids += more
    return ids


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}; fix or delete it") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a table of keys; fix or delete it")
    return content
