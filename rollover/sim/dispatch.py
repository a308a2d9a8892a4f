"""Decides which replica takes a call: the one that still has its cache if it has room, else the one with the least
load."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rollover.errors import RunError
from rollover.rollout.state import View
from rollover.sim.replica import Replica
from rollover.types import SampleId

_STALE = 8
"""Entries a lane holds per replica before those that are out of date are thrown out."""


@runtime_checkable
class Placing(Protocol):
    """A strategy that has a say in where its samples run.

    Example:
        ``FastLane`` with ``fast_lane=2`` sends the two oldest unfinished samples to replicas with ``fast_lane = True``.
    """

    def wants_fast_lane(self, view: View, sample_id: SampleId) -> bool:
        """Says that the sample should run on a lightly loaded replica."""


class Lane:
    """Some of the replicas, by load."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = replicas
        self._places = {replica.index: place for place, replica in enumerate(replicas)}
        self._bounds = [math.inf] * len(replicas)
        """By place: a load that the replica's is not below, and the load of an entry."""
        self._entries: list[tuple[float, int]] = []
        """A heap of (load, place); those that are not of the replica's bound are out of date."""
        self._refill()

    def least_loaded(self) -> Replica:
        """Raises ``RunError`` when every replica is down."""
        if len(self.replicas) == 1 and self.replicas[0].is_up:
            return self.replicas[0]
        entries, bounds = self._entries, self._bounds
        while entries:
            bound, place = entries[0]
            replica = self.replicas[place]
            if bound != bounds[place] or not replica.is_up:
                heapq.heappop(entries)
                if not replica.is_up:
                    bounds[place] = math.inf
            elif replica.load == bound:
                return replica
            else:
                bounds[place] = replica.load
                heapq.heapreplace(entries, (replica.load, place))
        raise RunError("every replica is down: nothing can be decoded")

    def eased(self, replica: Replica) -> None:
        if len(self.replicas) == 1:
            return
        place, load = self._places[replica.index], replica.load
        if load >= self._bounds[place]:
            return
        self._bounds[place] = load
        heapq.heappush(self._entries, (load, place))
        if len(self._entries) > _STALE * len(self.replicas):
            self._refill()

    def _refill(self) -> None:
        self._bounds = [r.load if r.is_up else math.inf for r in self.replicas]
        self._entries = [(bound, place) for place, bound in enumerate(self._bounds) if bound < math.inf]
        heapq.heapify(self._entries)


class Fleet:
    """All replicas. Say ``eased`` whenever one has fewer calls, or is up again."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = replicas
        self._lanes = {fast: Lane([r for r in replicas if r.model.fast_lane == fast]) for fast in (False, True)}
        self._parked_on: dict[SampleId, Replica] = {}

    def place(self, sample_id: SampleId, *, fast_lane: bool) -> Replica:
        """Return where to send the sample.

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

    def eased(self, replica: Replica) -> None:
        self._lanes[replica.model.fast_lane].eased(replica)

    def advance(self, now_s: float) -> None:
        for replica in self.replicas:
            replica.advance(now_s)
