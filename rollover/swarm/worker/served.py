"""The publications that a worker has served, as far back as tokens that it still holds."""

from __future__ import annotations

from rollover.swarm.wire.messages import MAX_SERVED, Head
from rollover.swarm.worker.held import HeldCalls


class ServedHeads:
    """The part of a ``Hello`` about the versions that held tokens may claim.

    Example: a worker that serves version 9 and holds tokens of version 7 names 7, 8 and 9.
    """

    def __init__(self, held: HeldCalls) -> None:
        self._held = held
        self._heads: list[Head] = []

    def add(self, head: Head) -> None:
        """Take note of weights that are served now. Tokens of those before may still come out of the engine, unless
        this is an older version, of a later epoch."""
        goes_back = any(head.version <= before.version for before in self._heads)
        self._heads = [*(self.needed() if goes_back else self._heads), head][-MAX_SERVED:]

    def clear(self) -> None:
        self._heads = []

    def needed(self) -> tuple[Head, ...]:
        """Return those from which held tokens may come, and the newest, oldest first."""
        oldest = self._held.oldest_version
        newest = self._heads[-1:]
        return tuple(h for h in self._heads if h in newest or (oldest is not None and h.version >= oldest))
