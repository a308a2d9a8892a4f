"""Decides which replica takes a call: the replica that still has its cache if it has room, else the one with the least
load."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollover.sim.replica import Replica
from rollover.types import SampleId


class ReplicaPool:
    """All replicas, each at the place of its index. Call ``eased`` whenever one has fewer calls."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = replicas
        in_lane_R = np.array([replica.model.fast_lane for replica in replicas])
        self._has_fast_lane = bool(in_lane_R.any())
        self._bounds_R = {fast: np.where(in_lane_R == fast, 0.0, math.inf) for fast in (False, True)}
        """For the fast lane and the rest: loads that those of the replicas are not below, infinite for replicas that
        are not in it."""
        self._parked_on: dict[SampleId, Replica] = {}

    def place(self, sample_id: SampleId, *, fast_lane: bool) -> Replica:
        """Return where to send the sample."""
        fast_lane = fast_lane and self._has_fast_lane
        before = self._parked_on.pop(sample_id, None)
        if before is not None and before.model.fast_lane == fast_lane and before.can_resume(sample_id):
            return before
        return self._emptiest(self._bounds_R[fast_lane])

    def _emptiest(self, bounds_R: NDArray[np.float64]) -> Replica:
        """Return the replica of the least occupancy, the first of several. Occupancies grow unheard of: the least bound
        is raised until it is one."""
        while True:
            replica = self.replicas[place := int(bounds_R.argmin())]
            if replica.occupancy == bounds_R[place]:
                return replica
            bounds_R[place] = replica.occupancy

    def parked(self, sample_id: SampleId, replica: Replica) -> None:
        self._parked_on[sample_id] = replica

    def eased(self, replica: Replica) -> None:
        self._bounds_R[replica.model.fast_lane][replica.index] = replica.occupancy

    def advance(self, now_s: float) -> None:
        for replica in self.replicas:
            replica.advance(now_s)
