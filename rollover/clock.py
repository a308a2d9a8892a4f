"""Time, taken from outside: the wall clock in production, virtual time in the simulator and in tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Protocol


class Clock(Protocol):
    """Seconds since an arbitrary origin, and a way to wait for them to pass.

    Example: with ``clock = SystemClock(origin_s=100.0)``, ``clock.now_s()`` starts at 100.0 and is at least 102.5 after
    ``await clock.sleep(2.5)``.
    """

    def now_s(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's monotonic clock, shifted to start at ``origin_s``."""

    def __init__(self, origin_s: float = 0.0) -> None:
        self._offset_s = origin_s - time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() + self._offset_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def wait_for_any(clock: Clock, limit_s: float, *events: asyncio.Event) -> None:
    """Return when one of ``events`` is set or ``limit_s`` seconds of ``clock`` have passed."""
    awaited: list[Coroutine[Any, Any, object]] = [clock.sleep(limit_s), *(event.wait() for event in events)]
    waiting = [asyncio.create_task(each) for each in awaited]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()
