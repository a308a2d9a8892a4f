"""Runs a few scoring processes, each of which can be killed along with everything that it started.

Consumes jobs, produces replies; a job waits for a free process, then at most its deadline for the reply. A
process that is late, dies or whose caller is cancelled is killed and replaced when next needed. No more than
``size`` run at a time; they start on first use and end with ``close`` or with this process. A reply counts only for the
request with the same number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import count
from typing import Any

from rollover.environments.child import Child
from rollover.environments.rewards.base import RewardSpec
from rollover.errors import RewardError

_NAME = "reward process"


class WorkerPool:
    """Runs jobs for rewards built from ``specs`` in up to ``size`` processes. Belongs to one event loop."""

    def __init__(self, specs: Sequence[RewardSpec], size: int) -> None:
        self._specs = tuple(specs)
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Child] = []
        self._children: set[Child] = set()
        self._closed = False
        self._numbers = count()

    @property
    def num_processes(self) -> int:
        """Return the number of processes that are alive now."""
        return len(self._children)

    async def run(self, job: dict[str, Any], begin: Callable[[], float]) -> dict[str, Any]:
        """Run one job and return the worker's reply. ``begin`` is called when it is the job's turn; it returns the
        deadline in seconds, or raises what the caller receives.

        Raises ``TimeoutError`` after the deadline, ``RewardError`` when the process dies or cannot start, and
        ``DataError`` when it says that the rewards cannot be built.
        """
        async with self._slots:
            self._require_open()
            timeout_s = begin()
            child = self._idle.pop() if self._idle else await self._start()
            try:
                self._require_open()
                async with asyncio.timeout(timeout_s):
                    reply = await self._ask(child, job)
            except BaseException:
                await self._discard(child)
                raise
            self._idle.append(child)
            return reply

    async def close(self) -> None:
        self._closed = True
        self._idle.clear()
        await asyncio.gather(*(self._discard(child) for child in tuple(self._children)))

    async def _start(self) -> Child:
        greeting = {"specs": [asdict(spec) for spec in self._specs]}
        child = await Child.start("rollover.environments.worker", greeting, _NAME)
        self._children.add(child)
        return child

    async def _ask(self, child: Child, job: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        child.send({"id": number, **job})
        reply = await child.receive()
        if (answered := reply.pop("id", None)) != number:
            raise RewardError(f"the {_NAME} answered request {answered!r} when asked {number}")
        return reply

    async def _discard(self, child: Child) -> None:
        ending = child.end()
        ending.add_done_callback(lambda _: self._children.discard(child))
        await asyncio.shield(ending)

    def _require_open(self) -> None:
        if self._closed:
            raise RewardError("scoring has ended")
