"""A notice that something has changed, for tasks that wait until a condition holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changes:
    """Wakes all who wait, each of whom looks for itself whether what it waits for is there.

    Example: ``await changes.until(lambda: not held.is_full)`` returns once ``changes.notify()`` has been called and the
    condition holds.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._event.wait()
