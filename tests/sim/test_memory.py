"""The collector may be rare in a simulation because it finds nothing there; afterwards it is as it was."""

from __future__ import annotations

import gc

import pytest

from rollover.errors import RunError
from rollover.sim.memory import NEW_OBJECTS, rare_collections
from rollover.sim.run import simulate
from rollover.sim.scenario import Failure
from rollover.workload.base import Workload
from rollover.workload.law import Generator
from tests.rollout.kit import NAMES
from tests.sim.kit import Lengths, one_replica, strategy_of
from tests.sim.test_run import LAW, TWO


def garbage_of(name: str, workload: Workload, steps: int) -> int:
    """Objects that only the collector can free once a simulation is over and forgotten."""
    strategy = strategy_of(name, group_size=4, rollout_batch_size=4, max_new_tokens=120, max_running=24)
    gc.collect()
    gc.disable()
    try:
        simulate(strategy, workload, TWO, steps=steps)
        return gc.collect()
    finally:
        gc.enable()


@pytest.mark.parametrize("name", NAMES)
def test_a_simulation_makes_no_cyclic_garbage(name: str) -> None:
    workload = Generator(LAW, 1)
    garbage_of(name, workload, 2)  # what is made once, the first time
    assert garbage_of(name, workload, 12) == 0


def test_thresholds_are_those_of_before_whatever_happens() -> None:
    before = gc.get_threshold()
    inside: list[tuple[int, int, int]] = []
    simulate(
        strategy_of("sync"),
        Lengths(lambda *_: 3),
        one_replica(),
        steps=1,
        observer=lambda event: inside.append(gc.get_threshold()),
    )
    assert set(inside) == {(NEW_OBJECTS, *before[1:])}
    assert gc.get_threshold() == before
    with pytest.raises(RunError):
        scenario = one_replica(failures=(Failure(replica=0, at_s=1.0, until_s=1e9),))
        simulate(strategy_of("sync"), Lengths(lambda *_: 30), scenario, steps=2)
    assert gc.get_threshold() == before


def test_who_has_switched_collection_off_keeps_it_off() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with rare_collections():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
