"""The ranks of a trainer and the process of the run lay down here what they pass on: in memory that they share.

A folder of its own for each trainer, which its user alone can enter. It lies in ``/dev/shm`` where there is room, else
below the run. Folders of processes that were killed are cleared away by the next trainer.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

_SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"rollover-trainer-(\d+)-.*")
_KEPT = 2
"""Published versions: an engine may still read the one before the newest."""


class Staging:
    """A folder for large values, and for the newest versions of the weights.

    Args:
        needed_bytes: the most that will lie there at a time.
        fallback: a place on disk, for where shared memory is too small.

    Example: ``Staging(2**30, fallback=run / "staging").publication(7)`` is an empty folder for weights of version 7.
    """

    def __init__(self, needed_bytes: int, *, fallback: Path) -> None:
        root = _SHARED_MEMORY
        if not root.is_dir() or not os.access(root, os.W_OK) or shutil.disk_usage(root).free < needed_bytes:
            root = fallback
            root.mkdir(parents=True, exist_ok=True)
        _clear_left_behind(root)
        self.path = Path(tempfile.mkdtemp(prefix=f"rollover-trainer-{os.getpid()}-", dir=root))
        self._published: list[Path] = []
        self._num_folders = 0

    def meeting(self) -> Path:
        """Return an empty folder where ranks can meet that have not met before."""
        return self._folder("ranks")

    def publication(self, version: int) -> Path:
        """Return an empty folder for the weights of ``version``; those of the version before the last one go."""
        folder = self._folder(f"v{version}")
        for old in self._published[: -(_KEPT - 1)]:
            shutil.rmtree(old, ignore_errors=True)
        self._published = [*self._published[-(_KEPT - 1) :], folder]
        return folder

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _folder(self, name: str) -> Path:
        self._num_folders += 1
        folder = self.path / f"{name}-{self._num_folders}"
        folder.mkdir()
        return folder


def lay_down(path: Path, value: Any) -> Path:
    """Write a value into a file for ranks to read, in place of the one before it, and return its path."""
    with path.open("wb") as file:
        pickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)
    return path


def _clear_left_behind(root: Path) -> None:
    """Delete the folders of processes that are no longer there."""
    for folder in root.glob("rollover-trainer-*"):
        if (name := _NAME.fullmatch(folder.name)) and not _is_alive(int(name[1])):
            with suppress(OSError):  # it is another user's
                shutil.rmtree(folder)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
