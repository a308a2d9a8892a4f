"""Write a folder at once: it is complete, or it is not there.

The content is written under a hidden name beside the folder and renamed. A process that is killed leaves at most a
``.partial-*`` folder; a run that goes on deletes its own.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from rollover.errors import ResourceError, RolloverError, is_full, system_error

PARTIAL = ".partial-"
"""Prefix of the name of an incomplete folder."""


def write_folder(
    folder: Path,
    write: Callable[[Path], None],
    *,
    remedy: str = "free some space, or lower checkpoint.keep_last",
    durable: bool = True,
) -> None:
    """Create ``folder`` with what ``write`` puts into the path it is given, or leave everything as it was.

    An existing folder is replaced. Raises ``ResourceError`` when the disk is full.

    Args:
        remedy: what the user can do about a full disk.
        durable: flush every file, so that the folder outlives a crash of the machine.
    """
    partial: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = _beside(folder)
        write(partial)
        _let_others_read(partial)
        for path in (*partial.rglob("*"), partial) if durable else ():
            _flush(path)
        _put(partial, folder)
        if durable:
            _flush(folder.parent)
    except RolloverError:
        raise
    except Exception as error:  # safetensors wraps the system's errors in one of its own
        if not is_full(error):
            raise system_error(error) or error from None
        raise ResourceError(
            f"no space left on the disk of {str(folder.parent)!r}: {folder.name} was not written, "
            f"earlier ones are intact; {remedy}"
        ) from error
    finally:
        if partial is not None and partial.exists():
            shutil.rmtree(partial, ignore_errors=True)


def _let_others_read(folder: Path) -> None:
    """Give the files the permissions that the umask gives to new ones. safetensors lets only their owner read them, but
    a server that loads the folder may run as another user."""
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for path in folder.rglob("*"):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            path.chmod(mode)


def _put(partial: Path, folder: Path) -> None:
    if not folder.exists():
        os.rename(partial, folder)
        return
    replaced = _beside(folder)
    os.rename(folder, replaced / folder.name)
    os.rename(partial, folder)
    shutil.rmtree(replaced)


def _beside(folder: Path) -> Path:
    path = folder.parent / f"{PARTIAL}{folder.name}-{uuid4().hex[:12]}"
    path.mkdir()  # unlike tempfile's, with the permissions that the umask gives
    return path


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
