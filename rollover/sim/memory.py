"""Python's garbage collector while a simulation runs: rare, and afterwards as it was.

A simulation keeps millions of records alive and makes no cycles among them: what it lets go of is freed at once. The
collector, left alone, walks over the young ones at every 700th and over all of them again and again, for nothing; that
is half of the time of a large run. It is not switched off, so that an observer that does make cycles stays bounded.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 1_000_000
"""Between two collections; fewer than a gigabyte of what could be garbage."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect at every ``NEW_OBJECTS`` that are allocated and not freed. Where collection is off it stays off."""
    young, *older = gc.get_threshold()
    gc.set_threshold(max(young, NEW_OBJECTS) if young else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
