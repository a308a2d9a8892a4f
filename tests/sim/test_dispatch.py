"""The least loaded replica takes the call, the first of several; whatever comes and goes."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.sim.dispatch import ReplicaPool
from rollover.sim.replica import Replica
from rollover.sim.scenario import ReplicaModel
from rollover.types import SampleId
from tests.sim.test_replica import call


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_the_least_loaded_replica_is_found(rng: random.Random) -> None:
    replicas = [Replica(ReplicaModel(c0_s=1.0, b0=rng.choice([2.0, 4.0, 5.0])), i) for i in range(rng.randint(2, 6))]
    pool = ReplicaPool(replicas)
    for group in range(50):
        found = pool.place(SampleId(group, 0), fast_lane=False)
        assert (found.occupancy, found.index) == min((r.occupancy, r.index) for r in replicas)
        if rng.random() < 0.6:
            found.add(call(group, 5))
        replica = rng.choice(replicas)
        if rng.random() < 0.1:
            replica.stop()
            pool.eased(replica)
        elif replica.calls and rng.random() < 0.7:
            del replica.calls[next(iter(replica.calls))]
            pool.eased(replica)
