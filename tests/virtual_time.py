"""An event loop whose clock jumps: when nothing is ready to run, the time of the next timer comes at once.

A test in virtual time takes as long as its computations take, whatever it waits for; and where nothing is ready
and no timer is set, nobody could ever wake up: that is a deadlock, reported as ``Deadlock`` instead of a hang.
Work handed to threads or processes is invisible to it.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Every task waits, and for nothing that could come."""


class _JumpingSelector(selectors.DefaultSelector):
    """Never blocks: waiting for ``timeout`` seconds means that they have passed."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise Deadlock("no task is ready and no timer is set")
        if not ready and timeout is not None and timeout > 0:
            self.now_s += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


class VirtualClock:
    """``rollover.clock.Clock`` of the running virtual loop; its origin is the start of the loop."""

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` in virtual time. Tasks left over are cancelled, as there."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)
