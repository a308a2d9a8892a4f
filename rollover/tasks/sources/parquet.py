"""``kind = "parquet"``: a Parquet file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollover.errors import DataError
from rollover.tasks.rows import DatasetRows
from rollover.tasks.sources.base import FileSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetConfig(FileSettings):
    """Takes prompts from a Parquet file."""

    kind: Literal["parquet"] = "parquet"
    """``"parquet"`` chooses a Parquet file."""

    def open(self, seed: int) -> DatasetRows:
        return self._not_empty(ParquetRows(self.file()))


class ParquetRows:
    """Reads a Parquet file through a memory-mapped table."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._path = path
        try:
            self._table = pq.read_table(path, memory_map=True)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from None

    @property
    def num_rows(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        try:
            return dict(self._table.slice(row, 1).to_pylist()[0])
        except ValueError as error:  # text that is not UTF-8, or a date that Python cannot represent
            raise DataError(f"{self.where(row)}: {error}; fix the row") from None

    def where(self, row: int) -> str:
        return f"{self._path}, row {row}"
