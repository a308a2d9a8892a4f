"""A lock on an open file (flock). The kernel frees it when its process ends, however that ends, so nothing has to be
cleared away."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def take(descriptor: int) -> None:
    """Lock the open file for this process until ``release``.

    Raises ``BlockingIOError`` when another process holds it, and ``OSError`` when the file system has no locks; the
    descriptor is closed then.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise


@contextmanager
def shared(file: Path) -> Iterator[None]:
    """Read ``file``, or the folder that it stands for, without ``claimed`` succeeding meanwhile.

    Raises ``FileNotFoundError`` when it is gone.
    """
    with file.open("rb") as opened:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(opened, fcntl.LOCK_SH)
        file.stat()  # it may have been claimed and deleted while this waited
        yield


@contextmanager
def claimed(file: Path) -> Iterator[bool]:
    """Claim ``file`` in order to delete it, unless another process shares it."""
    with file.open("r+b") as opened:  # NFS locks no file for one process alone that it cannot write
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a file system without locks
            pass
        yield True


def release(descriptor: int) -> None:
    """Free the lock and close the descriptor.

    Closing alone would free it later: a child that was forked a moment ago has the open file until it runs its
    program, and the lock belongs to the open file.
    """
    with suppress(OSError):  # some network file systems refuse; closing has to do there
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
