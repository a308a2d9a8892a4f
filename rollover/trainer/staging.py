"""The ranks of a trainer and the process of the run exchange large values here, in memory that they share.

Each trainer has a folder of its own, which only its user can enter. It is in ``/dev/shm`` if there is room and the
ranks are on this machine, else below the run. Its process holds a lock on it (flock), which ends with the process,
however that ends; the next trainer deletes folders that no process holds. Process numbers would not do: containers that
share ``/dev/shm`` do not see each other's.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollover import locks

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "rollover-staging-"
_LOCK = "lock"


class Staging:
    """A folder for large values, and for the newest versions of the weights.

    Args:
        needed_bytes: the most that will be there at a time.
        fallback: a place on disk, in case shared memory is too small.
        on_disk: use it in any case.
    """

    def __init__(self, needed_bytes: int, *, fallback: Path, on_disk: bool = False) -> None:
        root = _SHARED_MEMORY
        clear_left_behind(root)
        is_usable = root.is_dir() and os.access(root, os.W_OK) and shutil.disk_usage(root).free >= needed_bytes
        if on_disk or not is_usable:
            root = fallback
            root.mkdir(parents=True, exist_ok=True)
            clear_left_behind(root)
        self.path, self._lock = held_folder(root)
        self._filled: dict[int, Path] = {}
        self._num_folders = 0

    def meeting(self) -> Path:
        """Return an empty folder where new ranks can meet."""
        return self._folder("ranks")

    def filled(self, version: int, write: Callable[[Path], object]) -> Path:
        """Return the folder with the weights of ``version``, which ``write`` fills unless it exists already. The
        version before, which an engine may still read, stays, and older ones are deleted."""
        if version not in self._filled:
            for old in sorted(self._filled)[:-1]:
                shutil.rmtree(self._filled.pop(old), ignore_errors=True)
            folder = self._folder(f"v{version}")
            try:
                write(folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            self._filled[version] = folder
        return self._filled[version]

    def close(self) -> None:
        """Delete the folder. Does nothing when called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, None
        if lock is not None:
            locks.release(lock)

    def _folder(self, name: str) -> Path:
        self._num_folders += 1
        folder = self.path / f"{name}-{self._num_folders}"
        folder.mkdir()
        return folder


def lay_down(path: Path, value: Any) -> Path:
    """Write a value into a file for ranks to read, replacing the previous one, and return its path."""
    with path.open("wb") as file:
        pickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)
    return path


def held_folder(root: Path) -> tuple[Path, int | None]:
    """Create a folder and lock it. Returns it with the descriptor of its lock; ``None`` if the file system has no
    locks, in which case no trainer deletes anything there."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        try:
            lock = _locked(folder)
        except (BlockingIOError, FileNotFoundError):  # another trainer has taken it for an abandoned one
            continue
        except OSError:
            return folder, None
        if folder.exists():
            return folder, lock
        locks.release(lock)


def clear_left_behind(root: Path) -> None:
    """Delete the folders below ``root`` that no process holds."""
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is in use, or another user's
            lock = _locked(folder)
            shutil.rmtree(folder, ignore_errors=True)
            locks.release(lock)


def _locked(folder: Path) -> int:
    """Lock a folder until the returned descriptor is released. Raises ``BlockingIOError`` when another process holds
    it."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    locks.take(descriptor)
    return descriptor
