"""Work beside the caller: tasks that are kept until they end, and waits that come to an end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from rollover.errors import EngineError, EngineTimeout


class BackgroundTasks:
    """Tasks that are not awaited, kept until they are done."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def cancel(self) -> None:
        await cancel(self._tasks)


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and return when all have ended, however they do."""
    tasks = [*tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def within(limit_s: float, late: str) -> AsyncIterator[None]:
    """Raise ``EngineTimeout`` with the message ``late`` when the block takes longer than ``limit_s``."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except EngineTimeout:
        raise
    except TimeoutError:
        raise EngineTimeout(late) from None


async def attempt(work: Coroutine[Any, Any, object], limit_s: float) -> None:
    """Do ``work`` for at most ``limit_s``. Raises neither ``EngineError`` nor ``TimeoutError``."""
    with suppress(EngineError, TimeoutError):
        async with asyncio.timeout(limit_s):
            await work


async def in_time(work: Coroutine[Any, Any, None], limit_s: float, who: str, what: str) -> None:
    """Do ``work``. Raises ``EngineTimeout``, which says that ``who`` did not ``what``, after ``limit_s``."""
    async with within(limit_s, f"{who} did not {what} within {limit_s:g} s"):
        await work


@contextmanager
def refused(explained: Callable[[EngineError], EngineError]) -> Iterator[None]:
    """Raise what ``explained`` makes of an ``EngineError``; an ``EngineTimeout``, which refuses nothing, stays."""
    try:
        yield
    except EngineTimeout:
        raise
    except EngineError as e:
        raise explained(e) from e
