"""Rollout strategies, one a page; ``STRATEGIES`` names them."""

from rollover.rollout.strategies.april import April
from rollover.rollout.strategies.bounded_async import BoundedAsync
from rollover.rollout.strategies.concurrency import Concurrency
from rollover.rollout.strategies.fast_lane import FastLane
from rollover.rollout.strategies.inflight import InFlight
from rollover.rollout.strategies.oversample import Oversample
from rollover.rollout.strategies.probe import Probe
from rollover.rollout.strategies.rollover import Rollover
from rollover.rollout.strategies.sorted import Sorted
from rollover.rollout.strategies.sync import Sync
from rollover.rollout.strategies.tail_rounds import TailRounds
from rollover.rollout.strategies.threshold import Threshold
from rollover.rollout.strategies.token_budget import TokenBudget
from rollover.rollout.strategies.windowed import Windowed
from rollover.rollout.strategy import Strategy

STRATEGIES: dict[str, type[Strategy]] = {
    "sync": Sync,
    "oversample": Oversample,
    "april": April,
    "concurrency": Concurrency,
    "bounded_async": BoundedAsync,
    "token_budget": TokenBudget,
    "sorted": Sorted,
    "tail_rounds": TailRounds,
    "inflight": InFlight,
    "threshold": Threshold,
    "windowed": Windowed,
    "probe": Probe,
    "fast_lane": FastLane,
    "rollover": Rollover,
}

NEEDS = {"inflight": "in_flight_update", "fast_lane": "fast_lane"}
"""Strategies to the capability (``rollover.engine.base.Capabilities``) without which they would be another one."""

__all__ = [
    "NEEDS",
    "STRATEGIES",
    "April",
    "BoundedAsync",
    "Concurrency",
    "FastLane",
    "InFlight",
    "Oversample",
    "Probe",
    "Rollover",
    "Sorted",
    "Sync",
    "TailRounds",
    "Threshold",
    "TokenBudget",
    "Windowed",
]
