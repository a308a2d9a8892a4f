"""Watches a dataset file, which must stay as it is while a run reads it, and between a run and its resume.

Its content is known by its size and a hash: of all its bytes up to 64 MiB, beyond that of blocks spread evenly from
head to tail. A change that keeps the size and lies between those blocks is not seen.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from rollover.errors import DataError

_WHOLE_BYTES = 64 * 2**20
_BLOCK_BYTES = 2**18
_NUM_BLOCKS = 256


class Content(NamedTuple):
    """Tells the content of one file from that of another."""

    size: int
    sha256: str


class DataFile:
    """Remembers the file ``path`` as it is now. Raises ``DataError`` when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = self._read_stamp()
        self.content = self._read_content()

    @property
    def written_s(self) -> float:
        """Tell when it was written, in seconds since 1970."""
        return self._stamp[-1] / 1e9

    def check(self) -> None:
        """Raise ``DataError`` when the content is no longer that of the beginning. Cheap while nobody touches it."""
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        if self._read_content() != self.content:
            raise DataError(
                f"{self.path} has changed while it was read, so its rows are no longer those that were counted; put the"
                " right file back"
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
