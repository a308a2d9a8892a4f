"""A disk as a power cut would leave it: of each file, what was there when it was last synced."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from rollover.rollout.journal import Journal


class Disk:
    """Remembers the bytes of each file whenever it is synced.

    Of SQLite's files it knows the write-ahead log, which ``Journal.sync`` syncs. SQLite itself syncs the database
    when it moves a log of some megabytes into it, which these tests do not reach.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._synced: dict[Path, bytes] = {}
        sync = os.fsync

        def remember(descriptor: int) -> None:
            sync(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_file():
                self._synced[path] = path.read_bytes()

        patch.setattr(os, "fsync", remember)

    def journal_after_a_power_cut(self, path: Path, folder: Path) -> Journal:
        """The journal at ``path``, as it would be found if the power failed now; in ``folder``."""
        folder.mkdir(exist_ok=True)
        found = folder / path.name
        for file in folder.glob(f"{path.name}*"):
            file.unlink()
        shutil.copyfile(path, found)
        Path(f"{found}-wal").write_bytes(self._synced.get(Path(f"{path}-wal").resolve(), b""))
        return Journal(found)
