"""The rows of a dataset by number, which every kind of source opens."""

from __future__ import annotations

from typing import Any, Protocol


class DatasetRows(Protocol):
    """Gives the rows of a dataset by number, from 0; the same row for the same number, however often it is asked.

    Example: of a file with the lines ``{"question": "1+1"}`` and ``{"question": "2+2"}``, ``num_rows`` is 2,
    ``rows[1]`` is ``{"question": "2+2"}`` and ``rows.where(1)`` is ``"sums.jsonl, line 2"``.
    """

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
