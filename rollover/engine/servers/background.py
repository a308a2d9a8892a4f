"""Work beside the caller: tasks that somebody keeps, and waits that come to an end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from rollover.clock import Clock
from rollover.errors import EngineTimeout


class BackgroundTasks:
    """Tasks that nobody awaits, kept until they are done.

    Example: ``tasks.start(work())`` returns at once; ``await tasks.cancel()`` ends what is left.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def cancel(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def wait_for_any(clock: Clock, limit_s: float, *events: asyncio.Event) -> None:
    """Return when one of ``events`` is set or ``limit_s`` seconds of ``clock`` have passed."""
    awaited: list[Coroutine[Any, Any, object]] = [clock.sleep(limit_s), *(event.wait() for event in events)]
    waiting = [asyncio.create_task(each) for each in awaited]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()


async def in_time(work: Coroutine[Any, Any, None], limit_s: float | None, who: str, what: str) -> None:
    """Do ``work``. Raises ``EngineTimeout``, which says that ``who`` did not ``what``, after ``limit_s``."""
    try:
        async with asyncio.timeout(limit_s):
            await work
    except EngineTimeout:
        raise
    except TimeoutError:
        raise EngineTimeout(f"{who} did not {what} within {limit_s:g} s") from None
