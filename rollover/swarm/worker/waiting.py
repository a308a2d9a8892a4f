"""Waiting until a condition holds, and waiting before the next attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random


class Changes:
    """Wakes all who wait, each of whom looks for itself whether what it waits for is there."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._event.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """A rule for waiting between attempts."""

    first_s: float = 0.5
    most_s: float = 10.0

    def wait_s(self, num_failures: int, random: Random) -> float:
        """Return how long to wait after this number of failures in a row, at least one: half of the limit and up."""
        assert num_failures >= 1
        longest_s = min(self.most_s, self.first_s * 2.0 ** min(num_failures - 1, 60))
        return longest_s * (0.5 + 0.5 * random.random())
