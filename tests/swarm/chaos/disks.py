"""Disks that are full for a while: file systems in memory, where they may be mounted."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class SmallDisk:
    """A file system of its own.

    Example: ``disk.fill()`` leaves no byte on it, and ``disk.clear()`` gives back what that took.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Take all the space that is left."""
        with self._ballast.open("ab", buffering=0) as file:
            if (free_bytes := shutil.disk_usage(self.folder).free) > 0:
                with suppress(OSError):  # others write as well
                    os.posix_fallocate(file.fileno(), self._ballast.stat().st_size, free_bytes)
            file.seek(0, os.SEEK_END)
            for size in (2**12, 1):
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def clear(self) -> None:
        self._ballast.unlink(missing_ok=True)


@functools.cache
def can_mount() -> bool:
    """Tell whether file systems can be mounted here, which takes root."""
    with tempfile.TemporaryDirectory() as folder:
        if os.geteuid() != 0 or not _mount(Path(folder), 1):
            return False
        _unmount(Path(folder))
        return True


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[SmallDisk]:
    """A disk of that size at ``folder``, which does not exist yet. ``can_mount`` tells whether there can be one. What is
    on it when something goes wrong is left in ``folder``."""
    folder.mkdir()
    assert _mount(folder, megabytes), f"nothing can be mounted at {folder}"
    disk = SmallDisk(folder)
    try:
        yield disk
    except BaseException:
        disk.clear()
        kept = folder.with_name(f"{folder.name}.kept")
        shutil.copytree(folder, kept, symlinks=True)
        _unmount(folder)
        folder.rmdir()
        kept.rename(folder)
        raise
    _unmount(folder)


def _mount(folder: Path, megabytes: int) -> bool:
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "rollover-test", str(folder)]
    return subprocess.run(mounting, capture_output=True).returncode == 0


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
