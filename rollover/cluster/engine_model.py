"""The model that engine servers start with, on their nodes: read where it is, or sent there through Ray's object store.

A node that has the same files at the same path reads them there. Any other is sent them once: each server there has
links of its own to the copy, so a server that ends takes nothing from the others.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rollover.cluster.parts import AHEAD, PART_BYTES, digests_of

Ask = Callable[[Any, str], Awaitable[Any]]
"""Waits for an answer of a keeper, given what it is asked to do, for messages."""


class EngineModel:
    """A model folder of this machine, wanted on the nodes of servers.

    Example: on a node that lacks ``/models/policy`` the server is started with ``/tmp/rollover-r1-engine-0-x/policy``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._digests = digests_of(self.folder)
        self._copies: dict[str, Path] = {}
        """The newest copy on each node, by the node's id."""
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """A lock for each node: its servers start at the same time, and the first alone is sent the files."""

    async def on_node(self, node: str, keeper: Any, ask: Ask) -> Path:
        """Return where the node of ``keeper``, with the id ``node``, has the model. Raises as ``ask`` does."""
        async with self._turns[node]:
            if await self._is_there(keeper, ask):
                return self.folder
            names = [*self._digests]
            if node in self._copies:
                linked: Path | None = await ask(keeper.link.remote(self._copies[node], names), "share the model")
                if linked is not None:
                    return linked
            self._copies[node] = await self._sent(keeper, ask)
            return self._copies[node]

    async def _is_there(self, keeper: Any, ask: Ask) -> bool:
        return bool(await ask(keeper.sees.remote(self.folder, self._digests), "look for the model"))

    async def _sent(self, keeper: Any, ask: Ask) -> Path:
        """Send all files, a few parts at a time, and return the folder in which they are."""
        waiting: deque[Any] = deque()
        for name, size, offset in self._parts():
            part = await asyncio.to_thread(self._put, name, offset)
            waiting.append(keeper.write.remote(self.folder.name, name, size, offset, part))
            if len(waiting) > AHEAD:
                await ask(waiting.popleft(), "take a part of the model")
        for answer in waiting:
            folder: Path = await ask(answer, "take a part of the model")
        return folder

    def _parts(self) -> Iterator[tuple[str, int, int]]:
        for name in self._digests:
            size = (self.folder / name).stat().st_size
            for offset in range(0, max(size, 1), PART_BYTES):
                yield name, size, offset

    def _put(self, name: str, offset: int) -> Any:
        import ray

        return ray.put(np.fromfile(self.folder / name, dtype=np.uint8, count=PART_BYTES, offset=offset))
