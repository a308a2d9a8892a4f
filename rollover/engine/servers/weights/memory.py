"""Give back the memory of a server that shares its devices with the trainer, and take it again with new weights.

What is given back is written on the server itself, in the label of its weights, and before it happens: so a run that
comes after a killed run knows what it finds. The cache is taken last, when the weights are there: loading them
takes memory of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollover.engine.servers.weights.endpoint import WeightEndpoint
from rollover.engine.servers.weights.ownership import Part
from rollover.engine.servers.weights.served import ServedWeights
from rollover.errors import EngineError, EngineTimeout

_ALL: tuple[Part, ...] = ("weights", "cache")
_CACHE: tuple[Part, ...] = ("cache",)


class MemoryHeld(EngineError):
    """A server did not give its memory back and may hold it still.

    Example: a server that hangs. A server that cannot be reached at all has ended, and its memory is free.
    """


class ServerMemory:
    """The memory of one server.

    Example: after ``await memory.release()``, ``memory.is_released`` is true and the server's label ends with
    ``:asleep``; ``await memory.take(7, folder)`` leaves it with the weights of version 7 and an empty cache.
    """

    def __init__(self, name: str, endpoint: WeightEndpoint[Any], served: ServedWeights) -> None:
        self.is_released = False
        """Calls cannot be answered: some part of it was given back."""
        self._name = name
        self._endpoint = endpoint
        self._served = served

    async def find(self) -> None:
        """Find out whether an earlier run has left it without its memory."""
        self.is_released = bool(await self._served.parts_asleep())

    async def release(self) -> None:
        """Give back weights and cache. Raises ``EngineError``, and has nothing given back, when the server refuses."""
        if self.is_released and set(await self._served.parts_asleep()) == {*_ALL}:
            return
        self._served.forget(f"{self._name} has given its memory back and has no weights")
        await self._served.mark(_ALL)
        self.is_released = True
        try:
            await self._endpoint.release_memory()
        except EngineTimeout:
            raise
        except EngineError:
            await self._served.mark(())
            self.is_released = False
            raise

    async def take(self, version: int, source: Path) -> None:
        """Take again what is not there, and load ``source`` as ``version``. Raises ``EngineError``; what is there then
        is asked for the next time."""
        asleep = await self._served.parts_asleep()
        if "weights" in asleep:
            await self._endpoint.take_memory("weights")
            await self._served.mark(_CACHE)
        await self._served.install(version, source, keeps_kv=False, asleep=_CACHE if asleep else ())
        if asleep:
            await self._endpoint.take_memory("cache")
            await self._served.mark(())
        self.is_released = False
