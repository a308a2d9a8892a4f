"""The weights that a server serves, as far as we know, the run that they belong to, and the memory that they take.

Memory that is given back is written on the server itself, in the label of its weights, and before it happens: so a run
that comes after a killed run knows what it finds. Memory of the cache is taken again last, because loading weights
takes memory of its own.

Invariants: weights count as served once the server says so by their label; a server whose weights we do not
know gets no call; no weights are loaded into a server that another run uses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from rollover.engine.servers.http.client import HTTPClient
from rollover.engine.servers.weights.endpoint import WeightEndpoint
from rollover.engine.servers.weights.ownership import Ownership, Part, how_to_free
from rollover.engine.servers.weights.transfer import Receiver
from rollover.errors import EngineError, EngineTimeout

_ALL: tuple[Part, ...] = ("weights", "cache")
_CACHE: tuple[Part, ...] = ("cache",)


class MemoryHeld(EngineError):
    """A server did not give its memory back and may hold it still."""


class ServedWeights:
    """The weights that one server was given last: ``version`` 0 and the first ``source`` until then. ``source`` is
    ``None`` if they came from whoever held them, who may hold others by now.

    Example: after ``await served.install(7, source, keeps_kv=False)`` of run ``r`` the server's label is
    ``"rollover:r:7"``, and ``served.version`` is 7.
    """

    def __init__(self, endpoint: WeightEndpoint[Any], client: HTTPClient, ownership: Ownership, source: Path) -> None:
        self.version = 0
        self.source: Path | None = source
        self._ownership = ownership
        self._endpoint = endpoint
        self._client = client
        self._unknown: str | None = f"{client} is not open yet"
        """The reason why no call may be sent: the server's weights are unknown."""
        self._num_installs = 0
        self.is_asleep = False
        """Calls cannot be answered: some part of its memory was given back."""

    @property
    def label(self) -> str:
        """Return the label of the weights that the server was given last."""
        return self._ownership.label(self.version)

    def version_of(self, label: str | None, request_id: str) -> int:
        """Return the version of the weights that sampled tokens of a call; the present version if the server names
        none.

        Raises ``EngineError`` for weights that this run did not load.
        """
        if label is None:
            return self.version
        if (version := self._ownership.version(label)) is None:
            raise EngineError(
                f"{request_id}: its tokens were sampled by weights {self._client.reader.shown(label)!r}, which this"
                " run did not load: another program changes the server's weights, or the server was restarted"
            )
        return version

    def refuse_when_unknown(self) -> None:
        """Raise ``EngineError`` unless the server has the weights that it was given last."""
        if self._unknown is not None:
            raise EngineError(self._unknown)

    def forget(self, reason: str) -> None:
        """Treat the server's weights as unknown from now on."""
        self._unknown = reason

    async def install(self, version: int, source: Path, *, keeps_kv: bool) -> None:
        """Have the server load ``source`` as ``version``, with what was given back of its memory. After an
        ``EngineError`` we do not know its weights, and what is there of its memory is asked for the next time."""
        asleep = await self._parts_asleep() if self.is_asleep else ()
        if "weights" in asleep:
            await self._endpoint.take_memory("weights")
            await self._mark(_CACHE)
        self._begin()
        label = self._ownership.label(version, asleep=_CACHE if asleep else ())
        await self._endpoint.send(label, source, keeps_kv=keeps_kv)
        await self._end(version, source)
        if asleep:
            await self._endpoint.take_memory("cache")
            await self._mark(())
        self.is_asleep = False

    async def find_memory(self) -> None:
        """Find out whether an earlier run has left the server without its memory."""
        self.is_asleep = bool(await self._parts_asleep())

    async def release_memory(self) -> None:
        """Give back weights and cache. Raises ``EngineError``, and has nothing given back, when the server refuses."""
        if self.is_asleep and set(await self._parts_asleep()) == {*_ALL}:
            return
        self.forget(f"{self._client} has given its memory back and has no weights")
        await self._mark(_ALL)
        self.is_asleep = True
        try:
            await self._endpoint.release_memory()
        except EngineTimeout:
            raise
        except EngineError:
            await self._mark(())
            self.is_asleep = False
            raise

    async def _mark(self, asleep: Collection[Part]) -> None:
        """Write on the server what has been given back of its memory."""
        await self._endpoint.set_label(self._ownership.label(self.version, asleep=asleep))

    async def _parts_asleep(self) -> Collection[Part]:
        """Ask the server what has been given back of its memory, by whichever run."""
        return self._ownership.asleep(await self._endpoint.label())

    async def receive(self, version: int, *, keeps_kv: bool) -> Receiver:
        """Say how the server receives weights in a group. From now on we do not know what it has."""
        receiver = await self._endpoint.receiver(self._ownership.label(version), keeps_kv=keeps_kv)
        self._begin()
        return receiver

    async def settle(self, version: int, *, keeps_kv: bool) -> None:
        """Have the server serve what it has received. After an ``EngineError`` we do not know its weights."""
        await self._endpoint.settle(self._ownership.label(version), keeps_kv=keeps_kv)
        await self._end(version, None)

    def _begin(self) -> None:
        self._unknown = f"{self._client} failed while its weights were being replaced; its weights are unknown"
        self._num_installs += 1

    async def _end(self, version: int, source: Path | None) -> None:
        self.version, self.source, self._unknown = version, source, None
        self._compare(await self._endpoint.label())

    async def check(self, still: Callable[[], bool]) -> None:
        """Raise ``EngineError`` when the server has other weights than it was given. An answer that a load has
        overtaken, or that came when it was no longer asked for, says nothing.

        Args:
            still: tells whether the answer is still asked for.
        """
        before = self._num_installs
        label = await self._endpoint.label()
        if before == self._num_installs and still():
            self._compare(label)

    async def refuse_when_taken(self) -> None:
        """Raise ``EngineError`` when the server belongs to another run, which may be alive."""
        label = await self._endpoint.label()
        if (owner := self._ownership.owner(label)) is not None:
            shown = self._client.reader.shown
            raise EngineError(
                f"{self._client} belongs to run {shown(owner)}: it serves weights {shown(label)!r} and was not given"
                " back. Give this run another server (engine.urls), or, if that run is over, free this one with:"
                f" {how_to_free(self._client.url, self._client.key_env)}"
            )

    async def is_ours(self) -> bool:
        """Ask whether no other run has taken the server from us."""
        return self._ownership.owner(await self._endpoint.label()) is None

    async def give_back(self) -> None:
        """Say on the server that it is free, unless it has other weights than ours by now."""
        label = await self._endpoint.label() if self._num_installs else ""
        if (version := self._ownership.version(label)) is not None:
            asleep = self._ownership.asleep(label)
            await self._endpoint.set_label(self._ownership.label(version, asleep=asleep, free=True))

    def release(self) -> None:
        """Let other runs of this machine have the server."""
        self._ownership.release()

    def _compare(self, label: str) -> None:
        if self._ownership.version(label) == self.version:
            return
        owner = self._ownership.owner(label)
        cause = "it was restarted, or another program changes its weights" if owner is None else f"run {owner} uses it"
        shown = self._client.reader.shown
        self._unknown = (
            f"{self._client} says it serves weights {shown(label)!r}, though version {self.version} was loaded"
            f" ({self.label!r}): {shown(cause)}"
        )
        self.refuse_when_unknown()
