"""Waiting with an end: for one of several events, and for work that may take too long."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from rollover.clock import Clock
from rollover.errors import EngineTimeout


async def wait_for_any(clock: Clock, limit_s: float, *events: asyncio.Event) -> None:
    """Until one of ``events`` is set or ``limit_s`` seconds of ``clock`` have passed."""
    timer = asyncio.create_task(_passed(clock, limit_s))
    waiting = [timer, *(asyncio.create_task(_is_set(event)) for event in events)]
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


async def _passed(clock: Clock, seconds: float) -> None:
    await clock.sleep(seconds)


async def _is_set(event: asyncio.Event) -> None:
    await event.wait()
