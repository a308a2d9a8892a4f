"""Takes the fingerprint of a dataset, which tells it from any other, and watches a file while it is read.

A dataset must stay as it is while a run reads it, and between a run and its resume. A file is identified by its size
and a hash: of all its bytes up to 64 MiB, and of blocks spread evenly over a larger file. A change that keeps the size
and lies between those blocks is not noticed. The fingerprint of a dataset from the hub or a saved folder is the number
of rows and a hash of a few hundred of them, so that another version of the library or a new download of the same rows
does not count as a change.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from rollover.errors import DataError
from rollover.tasks.rows import DatasetRows

_WHOLE_BYTES = 64 * 2**20
_BLOCK_BYTES = 2**18
_NUM_BLOCKS = 256
_NUM_ROWS = 256

Fingerprint = dict[str, Any]
"""JSON: ``path``, ``size``, ``unit`` of the size, ``sha256`` and, for a file, when it was ``written``."""


class Content(NamedTuple):
    """Identifies the content of one file."""

    size: int
    sha256: str


class DataFile:
    """Remembers the file ``path`` as it is now. Raises ``DataError`` when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = self._read_stamp()
        self.content = self._read_content()

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the content as it was at the beginning."""
        written = datetime.datetime.fromtimestamp(self._stamp[-1] / 1e9).astimezone()
        return {
            "path": str(self.path),
            "size": self.content.size,
            "unit": "bytes",
            "sha256": self.content.sha256,
            "written": written.isoformat(timespec="seconds"),
        }

    def check(self) -> None:
        """Raise ``DataError`` when the content is no longer what it was at the beginning. Cheap while the file is not
        touched."""
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        if self._read_content() != self.content:
            raise DataError(
                f"{self.path} changed while it was being read, so its rows are no longer the rows that were counted;"
                " restore the right file"
            )
        self._stamp = stamp

    def _read_stamp(self) -> tuple[int, int, int]:
        try:
            status = self.path.stat()
        except OSError as error:
            raise self._unreadable(error) from None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _read_content(self) -> Content:
        digest = hashlib.sha256()
        try:
            with self.path.open("rb") as data:
                size = os.fstat(data.fileno()).st_size
                if size <= _WHOLE_BYTES:
                    digest.update(data.read())
                else:
                    for block in range(_NUM_BLOCKS):
                        data.seek((size - _BLOCK_BYTES) * block // (_NUM_BLOCKS - 1))
                        digest.update(data.read(_BLOCK_BYTES))
        except OSError as error:
            raise self._unreadable(error) from None
        return Content(size, digest.hexdigest())

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(f"{self.path} cannot be read: {error.strerror}")


def fingerprint_of_rows(rows: DatasetRows, path: str) -> Fingerprint:
    """Hash the number of rows and up to 256 of them, spread evenly."""
    assert rows.num_rows is not None
    num_taken = min(_NUM_ROWS, rows.num_rows)
    digest = hashlib.sha256()
    for place in range(num_taken):
        row = rows[(rows.num_rows - 1) * place // max(1, num_taken - 1)]
        # A value that JSON cannot hold (an image, say) is represented by its type, since it has no other lasting form.
        digest.update(json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__).encode())
    return {"path": path, "size": rows.num_rows, "unit": "rows", "sha256": digest.hexdigest()}
