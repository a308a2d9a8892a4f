"""Sets how often Python looks for garbage: cycles of records that nothing refers to any more.

Left alone, the collector scans the young objects after every 700 new ones, and all objects again and again. Where many
objects live long and hardly any form a cycle, this is wasted work: half the time of a large simulation, and a fifth of
a coordinator's time with a thousand members. This module is at the lowest level because both use it and neither
imports the other.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def rare_collections(num_new: int) -> Iterator[None]:
    """Let the collector run once per ``num_new`` records that are allocated and not freed, and as before afterwards. It
    is never switched off, so that memory stays bounded in code that does create cycles; if it is already off, it stays
    off.

    Example: ``with rare_collections(20_000): ...``
    """
    young, *older = gc.get_threshold()
    gc.set_threshold(max(young, num_new) if young else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
