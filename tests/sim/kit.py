"""Small simulations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rollover.engine.base import Capabilities
from rollover.rollout.events import Event
from rollover.rollout.strategy import Strategy
from rollover.sim.result import Simulation
from rollover.sim.run import simulate
from rollover.sim.scenario import ReplicaModel, Scenario
from rollover.sim.strategies import SimulatedRollout


class Lengths:
    """A workload whose lengths are given by a function of (prompt, sample, attempt)."""

    def __init__(self, length: Callable[[int, int, int], int], *, cap: int = 60, prompt_tokens: int = 3) -> None:
        self._length = length
        self._prompt_tokens = prompt_tokens
        self.cap = cap

    def prompt_id(self, index: int) -> str:
        return f"toy/{index}@0"

    def prompt_tokens(self, index: int) -> int:
        return self._prompt_tokens

    def group_lengths(self, index: int, group_size: int, attempt: int = 0) -> tuple[int, ...]:
        return tuple(min(self.cap, self._length(index, i, attempt)) for i in range(group_size))


def strategy_of(
    name: str, *, max_running: int = 2**31, prefill_tokens_per_iteration: float = math.inf, **config: Any
) -> Strategy:
    config = {"rollout_batch_size": 2, "group_size": 2, "max_new_tokens": 60} | config
    engine = Capabilities(
        max_running=max_running, max_context_tokens=2**31, prefill_tokens_per_iteration=prefill_tokens_per_iteration
    )
    return SimulatedRollout.of(name, **config).build_strategy(engine)


def watched(*given: Any, **more: Any) -> tuple[Simulation, list[Event]]:
    """A simulation and all its events."""
    events: list[Event] = []
    return simulate(*given, **more, observer=events.append), events


def one_replica(*, b0: float = 1e12, **model: Any) -> Scenario:
    """A token a second, whatever runs beside it, unless ``b0`` says otherwise."""
    scenario = {
        k: model.pop(k)
        for k in ("trainer", "reward", "kv_on_update", "colocated", "filter_zero_signal", "turns")
        if k in model
    }
    return Scenario(replicas=(ReplicaModel(c0_s=1.0, b0=b0, **model),), **scenario)
