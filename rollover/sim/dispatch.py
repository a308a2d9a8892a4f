"""Decides which replica takes a call: the replica that still has its cache if it has room, else the one with the least
load."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollover.sim.replica import Replica
from rollover.types import SampleId


class ReplicaPool:
    """All replicas, each at the place of its index. Call ``eased`` whenever one has fewer calls."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = replicas
        self._bounds_R = np.zeros(len(replicas))
        """Loads that those of the replicas are not below."""
        self._parked_on: dict[SampleId, Replica] = {}

    def place(self, sample_id: SampleId) -> Replica:
        """Return where to send the sample."""
        before = self._parked_on.pop(sample_id, None)
        if before is not None and before.can_resume(sample_id):
            return before
        return self._least_loaded()

    def _least_loaded(self) -> Replica:
        """Return the replica with the least load, the first of several. Loads grow unheard of: the least bound is
        raised until it is a load."""
        while True:
            replica = self.replicas[place := int(self._bounds_R.argmin())]
            if replica.load == self._bounds_R[place]:
                return replica
            self._bounds_R[place] = replica.load

    def parked(self, sample_id: SampleId, replica: Replica) -> None:
        self._parked_on[sample_id] = replica

    def eased(self, replica: Replica) -> None:
        self._bounds_R[replica.index] = replica.load

    def advance(self, now_s: float) -> None:
        for replica in self.replicas:
            replica.advance(now_s)
