"""A lock on an open file (flock). The kernel frees it when its process ends, however that ends, so nothing has to be
cleared away."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress


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


def release(descriptor: int) -> None:
    """Free the lock and close the descriptor.

    Closing alone would free it later: a child that was forked a moment ago has the open file until it runs its
    program, and the lock belongs to the open file.
    """
    with suppress(OSError):  # some network file systems refuse; closing has to do there
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
