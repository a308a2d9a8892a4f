"""Finite datasets as numbered rows: JSON lines, Parquet and Hugging Face ``datasets``.

A row is read when it is asked for; memory holds one file offset per JSON line, the memory-mapped table of
a Parquet file, and what ``datasets`` keeps. Whatever is wrong with a file is a ``DataError`` that names
the file and, where there is one, the line.
"""

from __future__ import annotations

import json
import re
from array import array
from pathlib import Path
from typing import Any, Protocol

from rollover.errors import DataError
from rollover.tasks.config import SourceConfig
from rollover.tasks.data_file import DataFile


class Rows(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict[str, Any]: ...

    def where(self, row: int) -> str:
        """Names the row in messages."""
        ...


class JsonlRows:
    """A file with one JSON object per line; blank lines are passed over. Every line is parsed once at the
    start, so that a broken one is found before the first prompt."""

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

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, row: int) -> dict[str, Any]:
        self._file.check()
        with self._path.open("rb") as file:
            file.seek(self._offsets[row])
            return self._parse(file.readline(), self._lines[row])

    def where(self, row: int) -> str:
        return f"{self._path}, line {self._lines[row]}"

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:  # broken, of more digits than Python reads, or nested too deep
            raise DataError(f"{self._path}, line {number}: not valid JSON ({error}); mend or delete the line") from None
        if not isinstance(value, dict):
            raise DataError(f"{self._path}, line {number}: expected a JSON object, got {type(value).__name__}")
        if _SURROGATE.search(line) and (half := _half_a_character(value)):
            raise DataError(
                f"{self._path}, line {number}: {half!r} is one half of a character (a lone surrogate) and no text;"
                " mend or delete the line"
            )
        return value


class ParquetRows:
    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._path = path
        try:
            self._table = pq.read_table(path, memory_map=True)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from None

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        try:
            return dict(self._table.slice(row, 1).to_pylist()[0])
        except ValueError as error:  # text that is not UTF-8, a date that Python does not know
            raise DataError(f"{self.where(row)}: {error}; mend the row") from None

    def where(self, row: int) -> str:
        return f"{self._path}, row {row}"


class HfRows:
    """A hub dataset or a ``save_to_disk`` folder, one split of it."""

    def __init__(self, path: str, subset: str | None, split: str) -> None:
        import datasets

        self._name = f"{path} [{split}]"
        try:
            if (Path(path) / "dataset_dict.json").exists():
                self._data = datasets.load_from_disk(path)[split]
            elif (Path(path) / "state.json").exists():
                self._data = datasets.load_from_disk(path)
            else:
                self._data = datasets.load_dataset(path, subset, split=split)
        except KeyError:
            known = ", ".join(sorted(datasets.load_from_disk(path)))
            raise DataError(f"dataset {path!r} has no split {split!r}; it has: {known}") from None
        except Exception as error:  # the library raises its own, the hub client's and the network's errors
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise DataError(
                f"dataset {path!r} (subset {subset!r}, split {split!r}) cannot be loaded: {reason}; check "
                "the name, or without a network give the path of a folder written by save_to_disk"
            ) from None

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return dict(self._data[row])

    def where(self, row: int) -> str:
        return f"dataset {self._name}, row {row}"


def dataset_file(config: SourceConfig) -> Path:
    """The file of a file source. Raises ``DataError`` when there is none."""
    path = Path(str(config.path))
    if not path.is_file():
        raise DataError(f"source {config.name!r}: no file {path} (relative to {Path.cwd()}); correct its path")
    return path


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Where the JSON text has one, alone or in a pair, the value is worth a closer look."""


def _half_a_character(value: Any) -> str:
    """A surrogate in some text of ``value``; empty where there is none."""
    if isinstance(value, str):
        return "".join(c for c in value if "\ud800" <= c <= "\udfff")[:1]
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((half for one in inner if (half := _half_a_character(one))), "")


def open_rows(config: SourceConfig) -> Rows:
    """Open the dataset of a file or hub source. Raises ``DataError`` when it is missing, broken or empty."""
    assert config.path is not None
    rows: Rows
    if config.kind == "hf":
        rows = HfRows(config.path, config.subset, config.split or "train")
    else:
        path = dataset_file(config)
        rows = JsonlRows(path) if config.kind == "jsonl" else ParquetRows(path)
    if not len(rows):
        raise DataError(f"source {config.name!r}: {config.path} holds no rows")
    return rows
