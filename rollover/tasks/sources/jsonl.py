"""``kind = "jsonl"``: a file with one JSON object per line.

A row is read when it is asked for; memory holds one offset per line. Every fault of a file raises a ``DataError`` that
names the file and the line.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollover.errors import DataError, parse_json
from rollover.tasks.fingerprint import DataFile
from rollover.tasks.rows import DatasetRows
from rollover.tasks.sources.base import FileSettings

_OTHER = {b"\x1f\x8b": "compressed by gzip", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_CONVERT = (
    "fix the line; a CSV file or a JSON array has to be converted, for example with pandas:"
    " `.to_json(path, orient='records', lines=True)`"
)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""A surrogate in JSON text, alone or in a pair, whose value needs a closer look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlConfig(FileSettings):
    """Takes prompts from a file of JSON lines.

    Example: ``JsonlConfig(name="gsm8k", path="gsm8k.jsonl", reward=MathVerifyConfig())`` on lines like
    ``{"question": "7 * 6 =", "answer": "42"}``.
    """

    kind: Literal["jsonl"] = "jsonl"
    """``"jsonl"`` chooses a file of JSON lines."""

    def open(self, seed: int) -> DatasetRows:
        return self._not_empty(JsonlRows(self.file()))


class JsonlRows:
    """Reads a file with one JSON object per line and skips blank lines. Every line is parsed once at the start, so that
    a broken one is found before the first prompt."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = DataFile(path)
        self._offsets = array("q")
        self._lines = array("q")
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._parse(line, number)
                    self._offsets.append(offset)
                    self._lines.append(number)
                offset += len(line)

    @property
    def num_rows(self) -> int:
        return len(self._offsets)

    def __getitem__(self, row: int) -> dict[str, Any]:
        self._file.check()
        with self._path.open("rb") as file:
            file.seek(self._offsets[row])
            return self._parse(file.readline(), self._lines[row])

    def where(self, row: int) -> str:
        return f"{self._path}, line {self._lines[row]}"

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        mend = _CONVERT if number == 1 else "fix or delete the line"
        try:
            value = parse_json(line, unique_keys=True)
        except ValueError as error:
            if kind := _OTHER.get(line[:2]):
                raise DataError(f"{self._path} is {kind}, not JSON lines in UTF-8; convert it") from None
            raise DataError(f"{self._path}, line {number}: not valid JSON ({error}); {mend}") from None
        if not isinstance(value, dict):
            raise DataError(f"{self._path}, line {number}: expected a JSON object, got {type(value).__name__}; {mend}")
        if _SURROGATE.search(line) and (half := _half_a_character(value)):
            raise DataError(
                f"{self._path}, line {number}: {half!r} is half a character (a lone surrogate), not text;"
                " fix or delete the line"
            )
        return value


def _half_a_character(value: Any) -> str:
    """Find a surrogate in a text of ``value``; empty if there is none."""
    if isinstance(value, str):
        return "".join(c for c in value if "\ud800" <= c <= "\udfff")[:1]
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((half for one in inner if (half := _half_a_character(one))), "")
