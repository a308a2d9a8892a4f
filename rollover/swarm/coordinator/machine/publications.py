"""The publications that a token may come from: of this start of the run, and of the earlier starts that it has
resumed from.

A run that starts again resumes from a checkpoint of version *r* and publishes it again, under another manifest, since
a manifest names its start (its epoch). Versions up to *r* are what they were. Those above *r* are made again from other
batches, so a publication of an earlier start above *r* is not one of this run, even if its number is reached again.

Invariants: a publication is known by its version and its digest together; a publication of an earlier start is known
only if it is on record, so a digest that was never published is not known under any version.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rollover.swarm.wire.messages import Head

Epoch = int
"""The number of a start of the run: 1 for the first."""


class Publications:
    """The publications of a run, by version and digest.

    Args:
        earlier: publications of earlier starts that are on record, oldest first, each with its start.
    """

    def __init__(self, earlier: Iterable[tuple[Epoch, Head]] = ()) -> None:
        self._earlier = tuple(earlier)
        self._resumed: frozenset[Head] = frozenset()
        self._of_this_start: dict[int, str] = {}

    def add(self, head: Head) -> None:
        """Record that a version is published in this start of the run."""
        if not self._of_this_start:
            self._resumed = _resumed(self._earlier, head.version)
        self._of_this_start[head.version] = head.manifest

    def is_of_this_start(self, version: int, manifest: str) -> bool:
        """Return whether this start of the run has published a version under this digest."""
        return self._of_this_start.get(version) == manifest

    def knows(self, head: Head) -> bool:
        """Return whether tokens sampled from a publication are tokens of this run."""
        return self.is_of_this_start(head.version, head.manifest) or head in self._resumed


def _resumed(earlier: Iterable[tuple[Epoch, Head]], began_at: int) -> frozenset[Head]:
    """Return what is left of earlier publications now that a start has begun with version ``began_at``: each start
    replaces the versions above its first."""
    left: list[Head] = []
    for _, group in groupby(earlier, key=lambda each: each[0]):
        heads = [head for _, head in group]
        left = [head for head in left if head.version <= heads[0].version] + heads
    return frozenset(head for head in left if head.version <= began_at)
