"""Sets how often Python looks for garbage: cycles of records that nothing refers to any more.

The collector, left alone, walks over the young records at every 700th and over all of them again and again. Where many
live long and hardly any makes a cycle, that is for nothing: half of the time of a large simulation, a fifth of that of
a coordinator with a thousand members. The module stands on the lowest floor because both of these use it, and neither
imports the other.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def rare_collections(num_new: int) -> Iterator[None]:
    """Have the collector run at every ``num_new`` records that are allocated and not freed, and afterwards as before.
    It is not switched off, so that whoever does make cycles stays bounded; where it is off, it stays off.

    Example: ``with rare_collections(20_000): ...``
    """
    young, *older = gc.get_threshold()
    gc.set_threshold(max(young, num_new) if young else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
