"""Processes that hold environments, seen from the run: which process answers a turn, and what happens when one dies.

An episode has its process, which answers its turns in order and may answer those of other episodes meanwhile. A turn
that is late fails its sample; the other turns are answered to their end while a new process takes new turns. If the
process dies while several turns are being answered, or one of them lets it do nothing else, nobody knows whose fault it
is: each of them is then tried once more, alone. A turn that fails alone fails its sample. No other sample ever fails
with it, since a lost episode is repeated from its record.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from rollover.environments.child import Child
from rollover.environments.scoring import ScoringResult
from rollover.errors import RewardError

_NAME = "environment's process"
_RESPONSE_S = 2.0
"""Seconds within which a process says what it does, unless a turn lets it do nothing else."""


@dataclass(slots=True, eq=False)
class _WorkerLife:
    """One life of the process."""

    child: Child
    asked: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    listening: asyncio.Task[None] = field(init=False)


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
        self._life: _WorkerLife | None = None
        """The one that takes new turns."""
        self._lives: set[_WorkerLife] = set()
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
        if self._life is not None:
            await self._life.child.send({"forget": key})

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(self._end(life) for life in self._lives))

    async def _answer(self, turn: dict[str, Any], past: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        life = await self._started()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._ask(life, turn)
                if answer.pop("missing", False):
                    answer = await self._ask(life, turn | past)
        except TimeoutError as error:
            if self._concurrency > 1 and turn["key"] in await self._at_work(life):
                self._retire(life)
                raise _final(error, timeout_s) from None
            await asyncio.shield(self._end(life))
            raise
        except asyncio.CancelledError:
            if self._concurrency == 1:  # otherwise the next turn would wait for this one
                await asyncio.shield(self._end(life))
            raise
        if "failure" in answer:
            ScoringResult(**answer).rewards()
        return answer

    async def _at_work(self, life: _WorkerLife) -> Collection[str]:
        """Return the episodes whose turns are being answered; none if a turn lets the process do nothing else."""
        with suppress(TimeoutError, _Died):
            async with asyncio.timeout(_RESPONSE_S):
                found: list[str] = (await self._ask(life, {}))["at_work"]
                return found
        return ()

    async def _ask(self, life: _WorkerLife, message: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        answer = life.asked[number] = asyncio.get_running_loop().create_future()
        try:
            await life.child.send({"id": number, **message})
            return await answer
        finally:
            del life.asked[number]
            if life is not self._life:
                self._retire(life)

    def _retire(self, life: _WorkerLife) -> None:
        """Give a process no new turns, and end it once the others are answered."""
        if self._life is life:
            self._life = None
        if not life.asked:
            life.child.end()

    async def _started(self) -> _WorkerLife:
        async with self._starting:
            if self._closed:
                raise RewardError("the run has ended")
            if self._life is None:
                module = "rollover.environments.episodes.worker"
                self._life = _WorkerLife(await Child.start(module, {"environment": self._environment}, _NAME))
                self._life.listening = asyncio.create_task(self._listen(self._life))
                self._lives.add(self._life)
            return self._life

    async def _listen(self, life: _WorkerLife) -> None:
        """Hand out answers until the process has ended."""
        try:
            while True:
                message = await life.child.receive()
                answer = life.asked.get(message.pop("id", -1))
                if answer is not None and not answer.done():
                    answer.set_result(message)
        except RewardError as error:
            if self._life is life:
                self._life = None
            for answer in life.asked.values():
                if not answer.done():
                    answer.set_exception(_Died(str(error)))
            await life.child.end()
            self._lives.discard(life)

    async def _end(self, life: _WorkerLife) -> None:
        if self._life is life:
            self._life = None
        await life.child.end()
        await asyncio.wait([life.listening])

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
