"""What an event costs does not grow with the number of samples in flight: counted in lines of Python, not in time."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from rollover.rollout.events import Event
from rollover.sim.run import simulate
from rollover.sim.scenario import Latency, ReplicaModel, Scenario
from rollover.workload.law import Generator
from tests.sim.kit import strategy_of
from tests.sim.test_run import LAW

G = 8


def lines_per_event(name: str, in_flight: int) -> float:
    """Lines executed in a run whose batches and replicas grow with the samples in flight."""
    num_groups = in_flight // G
    batch = {"rollout_batch_size": num_groups} if name == "sync" else {"rollout_batch_size": num_groups // 4}
    bound = {} if name == "sync" else {"max_staleness": 8}
    num_lines = num_events = 0

    def seen(event: Event) -> None:
        nonlocal num_events
        num_events += 1

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    replicas = (ReplicaModel(c0_s=1.0, b0=100.0, max_running=250),) * (in_flight // 250)
    scenario = Scenario(replicas=replicas, kv_on_update="keep", trainer=Latency(base_s=1.0))
    strategy = strategy_of(name, max_running=in_flight, group_size=G, max_new_tokens=120, **batch, **bound)
    before = sys.gettrace()
    sys.settrace(count)
    try:
        simulate(strategy, Generator(LAW), scenario, steps=3, observer=seen)
    finally:
        sys.settrace(before)
    return num_lines / num_events


@pytest.mark.parametrize("name", ["sync", "bounded_async", "rollover"])
def test_an_event_costs_the_same_however_many_samples_are_in_flight(name: str) -> None:
    assert lines_per_event(name, 2000) < 1.2 * lines_per_event(name, 500)
