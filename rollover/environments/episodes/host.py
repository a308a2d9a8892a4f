"""Processes that hold environments, seen from the run: which process answers a turn, and what happens when one dies.

An episode has its process, which answers its turns in order and may answer those of other episodes meanwhile. If a turn
is late or the process dies while several turns are being answered, nobody knows whose fault it is: each of them is then
tried once more, alone. A turn that fails alone fails its sample. No other sample ever fails with it, since a lost
episode is repeated from its record.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from rollover.environments.child import Child
from rollover.environments.scoring import ScoringResult
from rollover.errors import RewardError

_NAME = "environment's process"


class EpisodeProcess:
    """One process that holds environments, and is replaced when it dies. Belongs to one event loop.

    Args:
        environment: the settings in JSON.
        concurrency: turns that it answers at the same time.
    """

    def __init__(self, environment: dict[str, Any], concurrency: int) -> None:
        self._environment = environment
        self._concurrency = concurrency
        self._room = asyncio.Semaphore(concurrency)
        self._alone = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._child: Child | None = None
        self._listening: asyncio.Task[None] | None = None
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = count()
        self._closed = False

    async def answer(self, turn: dict[str, Any], past: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the answer to a turn. ``past``: what is added to it if the process does not have the episode.

        Raises:
            RewardError: it failed, was late, or ended the process.
        """
        async with self._room:
            try:
                return await self._answer(turn, past, timeout_s)
            except (TimeoutError, _Died) as error:
                if self._concurrency == 1:
                    raise _final(error, timeout_s) from None
        async with self._all_room():
            try:
                return await self._answer(turn, past, timeout_s)
            except (TimeoutError, _Died) as error:
                raise _final(error, timeout_s) from None

    async def forget(self, key: str) -> None:
        """Close an episode."""
        if self._child is not None:
            await self._child.send({"forget": key})

    async def close(self) -> None:
        self._closed = True
        await self._end()

    async def _answer(self, turn: dict[str, Any], past: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        child = await self._started()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._ask(child, turn)
                if answer.pop("missing", False):
                    answer = await self._ask(child, turn | past)
        except TimeoutError:
            await asyncio.shield(self._end())
            raise
        except asyncio.CancelledError:
            if self._concurrency == 1:  # otherwise the next turn would wait for this one
                await asyncio.shield(self._end())
            raise
        if "failure" in answer:
            ScoringResult(**answer).rewards()
        return answer

    async def _ask(self, child: Child, turn: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            await child.send({"id": number, **turn})
            return await answer
        finally:
            self._asked.pop(number, None)

    async def _started(self) -> Child:
        async with self._starting:
            if self._closed:
                raise RewardError("the run has ended")
            if self._child is None:
                child = await Child.start(
                    "rollover.environments.episodes.worker", {"environment": self._environment}, _NAME
                )
                self._child, self._listening = child, asyncio.create_task(self._listen(child))
            return self._child

    async def _listen(self, child: Child) -> None:
        """Hand out answers until the process has ended."""
        try:
            while True:
                message = await child.receive()
                answer = self._asked.get(message.pop("id", -1))
                if answer is not None and not answer.done():
                    answer.set_result(message)
        except RewardError as error:
            if self._child is child:
                self._child = None
            asked, self._asked = self._asked, {}
            for answer in asked.values():
                if not answer.done():
                    answer.set_exception(_Died(str(error)))
            await child.end()

    async def _end(self) -> None:
        if (child := self._child) is not None:
            self._child = None
            await child.end()
            if self._listening is not None:
                await asyncio.wait([self._listening])

    @asynccontextmanager
    async def _all_room(self) -> AsyncIterator[None]:
        """Wait until nothing else is being answered, and keep it so."""
        taken = 0
        async with self._alone:
            try:
                while taken < self._concurrency:
                    await self._room.acquire()
                    taken += 1
                yield
            finally:
                for _ in range(taken):
                    self._room.release()


class _Died(Exception):
    """The process has died while it answered."""


def _final(error: Exception, timeout_s: float) -> RewardError:
    if isinstance(error, TimeoutError):
        return RewardError(f"it took more than {timeout_s:g} s (environment.turn_timeout_s)")
    return RewardError(str(error))
