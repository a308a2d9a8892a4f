"""Files that only their owner may read: they hold secrets, or what a model was asked and what it answered."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_MODE = 0o600


def make_private(file: Path) -> None:
    """Make an empty ``file`` that others cannot read; of one that exists, take the right to read it from them.

    Raises ``OSError`` when it cannot be made. What belongs to somebody else is left as it is.
    """
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _MODE))
    except FileExistsError:
        with suppress(PermissionError):
            file.chmod(_MODE)
