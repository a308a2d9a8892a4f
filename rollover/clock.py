"""Time, taken from outside: the wall clock in production, virtual time in the simulator and in tests."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since an arbitrary origin, and a way to wait for them to pass."""

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
