"""The protocols of whoever fetches publications for a worker: from the name of a manifest to verified weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rollover.swarm.wire.messages import Head
from rollover.weights.base import WeightSource


class Fetched(WeightSource, Protocol):
    """One version of the weights, fetched and verified.

    Example: ``engine.load(fetched.version, fetched)``, after ``fetched.write_folder(root)`` for an engine that reads a
    folder.
    """

    @property
    def version(self) -> int: ...

    @property
    def digest(self) -> str:
        """Return the name of the manifest's blob."""
        ...

    @property
    def prepare_s(self) -> float: ...

    @property
    def wire_bytes(self) -> int: ...

    def write_folder(self, root: Path) -> Path:
        """Write a model folder with these weights into ``root``; ``folder`` is then this one. Synchronous."""
        ...


class Fetcher(Protocol):
    """Fetches the publications of one run.

    Example: ``await fetcher.fetch(welcome.head, urls, run_epoch=welcome.run_epoch, deadline_s=600)``
    """

    async def fetch(self, head: Head, urls: Sequence[str], *, run_epoch: int, deadline_s: float) -> Fetched:
        """Fetch and verify the weights of ``head`` from ``{url}/{digest}``, best guess first. It may be cancelled.

        Raises ``RolloverError`` when they cannot be had in time, or are not what the publisher signed.
        """
        ...

    async def close(self) -> None: ...
