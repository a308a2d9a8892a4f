"""The least loaded replica that is up takes the call, the first of several; whatever comes, goes or breaks."""

from __future__ import annotations

import random

import pytest

from rollover.errors import RunError
from rollover.sim.dispatch import ReplicaPool
from rollover.sim.replica import Replica
from rollover.sim.scenario import ReplicaModel
from rollover.types import SampleId
from tests.sim.test_replica import call


@pytest.mark.parametrize("seed", range(20))
def test_the_least_loaded_replica_is_found(seed: int) -> None:
    rng = random.Random(seed)
    replicas = [Replica(ReplicaModel(c0_s=1.0, b0=rng.choice([2.0, 4.0, 5.0])), i) for i in range(rng.randint(2, 6))]
    pool = ReplicaPool(replicas)
    for group in range(400):
        up = [r for r in replicas if r.is_up]
        if not up:
            with pytest.raises(RunError, match="every replica is down"):
                pool.place(SampleId(group, 0), fast_lane=False)
        else:
            found = pool.place(SampleId(group, 0), fast_lane=False)
            assert (found.load, found.index) == min((r.load, r.index) for r in up)
            if rng.random() < 0.6:
                found.add(call(group, 5))
        replica = rng.choice(replicas)
        if rng.random() < 0.1:  # breaks down, or is up again
            replica.is_up = not replica.is_up
            replica.stop()
            pool.eased(replica)
        elif replica.calls and rng.random() < 0.7:
            del replica.calls[next(iter(replica.calls))]
            pool.eased(replica)
