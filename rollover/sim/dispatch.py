"""Which replica takes a call: the one that still has its cache if it has room, else the one with the least load."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from rollover.errors import RunError
from rollover.sim.replica import Replica
from rollover.types import SampleId

_STALE = 8
"""Entries a lane holds per replica before those that are out of date are thrown out."""


class Lane:
    """Some of the replicas, by load."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = replicas
        self._places = {replica.index: place for place, replica in enumerate(replicas)}
        self._loads: list[tuple[float, int]] = []
        """With entries that are out of date."""
        self._refill()

    def least_loaded(self) -> Replica:
        """Raises ``RunError`` when every replica is down."""
        if len(self.replicas) == 1 and self.replicas[0].is_up:
            return self.replicas[0]
        while self._loads:
            load, place = self._loads[0]
            replica = self.replicas[place]
            if replica.is_up and replica.load == load:
                return replica
            heapq.heapreplace(self._loads, (replica.load, place)) if replica.is_up else heapq.heappop(self._loads)
        raise RunError("every replica is down: nothing can be decoded")

    def changed(self, replica: Replica) -> None:
        if len(self.replicas) == 1:
            return
        if len(self._loads) > _STALE * len(self.replicas):
            self._refill()
        elif replica.is_up:
            heapq.heappush(self._loads, (replica.load, self._places[replica.index]))

    def _refill(self) -> None:
        self._loads = [(r.load, place) for place, r in enumerate(self.replicas) if r.is_up]
        heapq.heapify(self._loads)


class Fleet:
    """All replicas. Say ``changed`` whenever a replica's calls have."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = replicas
        self._lanes = {fast: Lane([r for r in replicas if r.model.fast_lane == fast]) for fast in (False, True)}
        self._parked_on: dict[SampleId, Replica] = {}

    def place(self, sample_id: SampleId, *, fast_lane: bool) -> Replica:
        """Where to send the sample.

        Raises:
            RunError: every replica is down.
        """
        fast_lane = fast_lane and bool(self._lanes[True].replicas)
        before = self._parked_on.pop(sample_id, None)
        if before is not None and before.model.fast_lane == fast_lane and before.can_resume(sample_id):
            return before
        return self._lanes[fast_lane].least_loaded()

    def parked(self, sample_id: SampleId, replica: Replica) -> None:
        self._parked_on[sample_id] = replica

    def changed(self, replica: Replica) -> None:
        self._lanes[replica.model.fast_lane].changed(replica)

    def advance(self, now_s: float) -> None:
        for replica in self.replicas:
            replica.advance(now_s)
