"""Which weights a server serves, as far as we know, and whose they are.

What it keeps true: weights count as served once the server says so by their label; a server whose weights are none that
we know gets no call; none is loaded into a server that another run uses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rollover.engine.servers.client import HTTPClient
from rollover.engine.servers.ownership import Ownership, how_to_free
from rollover.errors import EngineError


class LabelledWeights(Protocol):
    """A server's own calls for its weights. All raise ``EngineError``."""

    async def replace_weights(self, label: str, folder: Path) -> None:
        """Load the folder, forget what was cached for new calls, and set the label."""
        ...

    async def label(self) -> str:
        """What the server calls the weights that it serves."""
        ...

    async def set_label(self, label: str) -> None:
        """Call the weights that it serves otherwise."""
        ...

    async def confirm(self, version: int, folder: Path) -> None:
        """That what was just loaded is ``folder``, where the server can show more than a label."""
        ...


class ServedWeights:
    """``version`` and ``folder`` are what the server was given last; version 0 and the first folder until then."""

    def __init__(self, server: LabelledWeights, client: HTTPClient, ownership: Ownership, folder: Path) -> None:
        self.version = 0
        self.folder = folder
        self.ownership = ownership
        self._server = server
        self._client = client
        self._unfit: str | None = f"{client} is not open yet"
        """Why no call may be sent: its weights are none that we know."""
        self._num_installs = 0

    @property
    def label(self) -> str:
        """Of what the server was given last."""
        return self.ownership.label(self.version)

    def refuse_when_unfit(self) -> None:
        """Raises ``EngineError`` unless the server has the weights that it was given last."""
        if self._unfit is not None:
            raise EngineError(self._unfit)

    def lost(self, reason: str) -> None:
        """From now on its weights are none that we know."""
        self._unfit = reason

    async def install(self, version: int, folder: Path) -> None:
        """Have the server load ``folder`` as ``version``. After an ``EngineError`` it has no weights that we know."""
        self._unfit = f"{self._client} failed while its weights were replaced; it has none that are known"
        self._num_installs += 1
        await self._server.replace_weights(self.ownership.label(version), folder)
        await self._server.confirm(version, folder)
        self.version, self.folder, self._unfit = version, folder, None
        self._compare(await self._server.label())

    async def check(self, still: Callable[[], bool]) -> None:
        """Raises ``EngineError`` when the server has other weights than it was given. An answer that a load has
        overtaken, or that came when it was no longer asked for, says nothing.

        Args:
            still: whether the answer is still asked for.
        """
        before = self._num_installs
        label = await self._server.label()
        if before == self._num_installs and still():
            self._compare(label)

    async def refuse_when_taken(self) -> None:
        """Raises ``EngineError`` when the server belongs to another run, which may be alive."""
        label = await self._server.label()
        if (owner := self.ownership.owner(label)) is not None:
            shown = self._client.reader.shown
            raise EngineError(
                f"{self._client} belongs to run {shown(owner)}: it serves weights {shown(label)!r} and was not given"
                " back. Give this run another server (engine.urls), or, if that run is over, free this one with:"
                f" {how_to_free(self._client.url)}"
            )

    async def is_ours(self) -> bool:
        """Whether no other run has taken it from us."""
        return self.ownership.owner(await self._server.label()) is None

    async def give_back(self) -> None:
        """Say on the server that it is free, unless it has other weights than ours by now."""
        if self._num_installs and (version := self.ownership.version(await self._server.label())) is not None:
            await self._server.set_label(self.ownership.label(version, free=True))

    def _compare(self, label: str) -> None:
        if self.ownership.version(label) == self.version:
            return
        owner = self.ownership.owner(label)
        cause = (
            "it has been restarted, or somebody else changes its weights" if owner is None else f"run {owner} uses it"
        )
        shown = self._client.reader.shown
        self._unfit = (
            f"{self._client} says it serves weights {shown(label)!r}, though version {self.version} was loaded"
            f" ({self.label!r}): {shown(cause)}"
        )
        self.refuse_when_unfit()
