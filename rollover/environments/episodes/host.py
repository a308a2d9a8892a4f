"""Processes that hold environments, seen from the run: which process answers a turn, and what happens when one dies.

An episode has its process. One that answers a turn at a time is sent all turns as they come, so that it never waits for
the run; if a turn is late, counted from the answer before it or from the last turn repeated for it, or the process
dies, the first unanswered turn fails its sample, and a new process gets the others. Where several turns are answered at
the same time, a turn that is late fails its sample; the others are answered to their end while a new process takes new
turns. If that process dies, or one turn lets it do nothing else, nobody knows whose fault it is: each is then tried
once more, alone. A turn that fails alone fails its sample. No other sample ever fails with it, since a lost episode is
repeated from its record.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count, repeat
from typing import Any

from rollover.environments.child import Child
from rollover.environments.episodes.base import EnvironmentTimeout
from rollover.environments.scoring import ScoringResult
from rollover.errors import RewardError

_NAME = "environment's process"
_RESPONSE_S = 2.0
"""Seconds within which a process says what it does, unless a turn lets it do nothing else."""


@dataclass(slots=True, eq=False)
class _WorkerLife:
    child: Child
    asked: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    listening: asyncio.Task[None] = field(init=False)
    timer: asyncio.TimerHandle | None = None


class EpisodeProcess:
    """One process that holds environments, and is replaced when it dies. Belongs to one event loop.

    Args:
        environment: the settings in JSON.
        concurrency: turns that it answers at the same time.
    """

    def __init__(self, environment: dict[str, Any], concurrency: int) -> None:
        self._environment = environment
        self._concurrency = concurrency
        self._timeout_s: float = environment["turn_timeout_s"]
        self._late = f"it took more than {self._timeout_s:g} s (environment.turn_timeout_s)"
        self._is_serial = concurrency == 1
        self._room = asyncio.Semaphore(concurrency)
        self._alone = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._life: _WorkerLife | None = None
        """The process that takes new turns."""
        self._lives: set[_WorkerLife] = set()
        self._numbers = count()
        self._closed = False

    async def answer(self, turn: dict[str, Any], past: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the answer to a turn. ``past`` returns what is added to it if the process does not have the episode.

        Raises:
            RewardError: it failed, was late, or ended the process.
        """
        failure = ""
        for room in repeat(nullcontext()) if self._is_serial else (self._room, self._all_room()):
            try:
                async with room:
                    return await self._answer(turn, past)
            except _Lost as lost:
                failure = str(lost)
        raise self._failed(failure)

    def forget(self, key: str) -> None:
        """Close an episode. It has the time of a turn: if it hangs, that is no turn's fault."""
        if self._life is not None:
            self._begin(self._life, {"forget": key})

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(self._end(life) for life in self._lives))

    async def _answer(self, turn: dict[str, Any], past: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        life = await self._started()
        try:
            async with asyncio.timeout(None if self._is_serial else self._timeout_s):
                answer = await self._ask(life, turn)
                if answer.pop("missing", False):
                    answer = await self._ask(life, turn | past())
        except TimeoutError:
            if turn["key"] in await self._at_work(life):
                self._retire(life)
                raise self._failed(self._late) from None
            await asyncio.shield(self._end(life))
            raise _Lost(self._late) from None
        if "failure" in answer:
            ScoringResult(**answer).rewards()
        return answer

    async def _at_work(self, life: _WorkerLife) -> Collection[str]:
        """Return the episodes whose turns are being answered; none if a turn lets the process do nothing else."""
        with suppress(TimeoutError, _Lost):
            async with asyncio.timeout(_RESPONSE_S):
                return tuple((await self._ask(life, {}))["at_work"])
        return ()

    async def _ask(self, life: _WorkerLife, message: dict[str, Any]) -> dict[str, Any]:
        if self._is_serial and life is not self._life:
            raise _Lost
        number, answer = self._begin(life, message)
        try:
            return await answer
        finally:
            if not self._is_serial:  # which is asked until it is answered, even if nobody waits for that any more
                life.asked.pop(number, None)
                if life is not self._life:
                    self._retire(life)

    def _begin(self, life: _WorkerLife, message: dict[str, Any]) -> tuple[int, asyncio.Future[dict[str, Any]]]:
        number = next(self._numbers)
        answer = life.asked[number] = asyncio.get_running_loop().create_future()
        life.child.send({"id": number, **message})
        if self._is_serial and len(life.asked) == 1:
            self._watch(life)
        return number, answer

    def _watch(self, life: _WorkerLife) -> None:
        """Begin the time of the first turn that is not answered, or of the next turn that is repeated for it."""
        if life.timer is not None:
            life.timer.cancel()
        later = asyncio.get_running_loop().call_later
        life.timer = later(self._timeout_s, self._give_up, life, self._late) if life.asked else None

    def _give_up(self, life: _WorkerLife, reason: str) -> None:
        """End a process, by the fault of its first turn if it answers one at a time."""
        if self._life is life:
            self._life = None
        for place, answer in enumerate(life.asked.values()):
            if not answer.done():
                answer.set_exception(self._failed(reason) if self._is_serial and not place else _Lost(reason))
                answer.exception()  # nobody waits for an episode to be closed
        life.child.end()

    def _failed(self, reason: str) -> RewardError:
        return EnvironmentTimeout(reason) if reason == self._late else RewardError(reason)

    def _retire(self, life: _WorkerLife) -> None:
        """Give a process no new turns, and end it once the others are answered."""
        if self._life is life:
            self._life = None
        if not life.asked:
            life.child.end()

    async def _started(self) -> _WorkerLife:
        if self._life is not None:
            return self._life
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
                number = message.pop("id", -1)
                answer = None if "repeated" in message else life.asked.pop(number, None)
                if self._is_serial:
                    self._watch(life)
                if answer is not None and not answer.done():
                    answer.set_result(message)
        except RewardError as error:
            self._give_up(life, str(error))
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
        async with self._alone, AsyncExitStack() as all_room:
            for _ in range(self._concurrency):
                await all_room.enter_async_context(self._room)
            yield


class _Lost(Exception):
    """The process has ended, and maybe by another turn's fault."""
