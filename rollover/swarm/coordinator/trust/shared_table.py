"""A table by worker name in a file, which commands change while a run reads it."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

from rollover.errors import RunError
from rollover.privacy import make_private
from rollover.swarm.publication.blobs import replace_file

T = TypeVar("T")

_LOCK_TIMEOUT_S = 10.0
"""Longest wait for another command to write the table, which takes milliseconds."""


class SharedTable(Generic[T]):
    """The rows of ``file``, as they are now, even when another process has changed them.

    Args:
        kind: of a row.
        remedy: what to do about a file that cannot be read.

    Example: ``with table.changing() as rows: rows["laptop"] = row`` keeps other processes out until it is written.
    """

    def __init__(self, file: Path, kind: type[T], *, remedy: str) -> None:
        self._file, self._kind, self._remedy = file, kind, remedy
        self._stamp: tuple[int, int] | None = None
        self._rows: dict[str, T] = {}

    def rows(self) -> Mapping[str, T]:
        """Return the rows by name; none if there is no file. Raises ``RunError`` for a file that cannot be read."""
        try:
            status = self._file.stat()
        except FileNotFoundError:
            return {}
        if (stamp := (status.st_mtime_ns, status.st_ino)) != self._stamp:
            self._rows, self._stamp = self._read(), stamp
        return self._rows

    @contextmanager
    def changing(self) -> Iterator[dict[str, T]]:
        """Yield the rows to be changed, and write them at the end, at once and durably; write nothing if the work
        raises.

        Raises ``RunError`` for a file that cannot be read or is kept locked, ``ResourceError`` on a full disk.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)
        lock = self._file.with_suffix(".lock")
        make_private(lock)
        with lock.open("wb") as held:
            self._lock(held)
            self._stamp = None
            rows = dict(self.rows())
            yield rows
            content = msgspec.json.format(msgspec.json.encode({"workers": rows}), indent=1) + b"\n"
            replace_file(self._file, content, is_private=True)
            self._stamp = None

    def _lock(self, held: BinaryIO) -> None:
        deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise RunError(
                        f"{held.name} has been locked for {_LOCK_TIMEOUT_S:g} s: another rollover command that changes"
                        " the workers does not end; stop it"
                    ) from None
                time.sleep(0.05)

    def _read(self) -> dict[str, T]:
        try:
            found: Any = msgspec.json.decode(self._file.read_bytes())
            return {str(name): msgspec.convert(row, self._kind) for name, row in found["workers"].items()}
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise RunError(f"{self._file} cannot be read ({e}): {self._remedy}") from None
