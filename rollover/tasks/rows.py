"""The rows of a dataset by number, which every kind of source opens."""

from __future__ import annotations

from typing import Any, Protocol


class DatasetRows(Protocol):
    """Gives the rows of a dataset by number, from 0; the same row for the same number, however often it is asked."""

    @property
    def num_rows(self) -> int | None:
        """Count the rows; ``None`` means that they have no end."""
        ...

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Read a row. Raises ``DataError`` when it cannot be read."""
        ...

    def where(self, row: int) -> str:
        """Return the place of the row for messages."""
        ...
