"""The strategies that runs can use. Each file holds one and its options; each has a row in ``STRATEGIES``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

from rollover.rollout.strategies.april import April, AprilConfig
from rollover.rollout.strategies.bounded_async import BoundedAsync, BoundedAsyncConfig
from rollover.rollout.strategies.concurrency import Concurrency, ConcurrencyConfig
from rollover.rollout.strategies.config import Knob, Need, StrategyConfig
from rollover.rollout.strategies.inflight import InFlight, InFlightConfig
from rollover.rollout.strategies.oversample import Oversample, OversampleConfig
from rollover.rollout.strategies.rollover import Rollover, RolloverConfig
from rollover.rollout.strategies.sync import Sync, SyncConfig
from rollover.rollout.strategies.token_budget import TokenBudget, TokenBudgetConfig

STRATEGIES: dict[str, type[StrategyConfig]] = {
    "april": AprilConfig,
    "sync": SyncConfig,
    "oversample": OversampleConfig,
    "concurrency": ConcurrencyConfig,
    "bounded_async": BoundedAsyncConfig,
    "token_budget": TokenBudgetConfig,
    "inflight": InFlightConfig,
    "rollover": RolloverConfig,
}
"""By kind. The first is meant where a config names none."""

if TYPE_CHECKING:
    AnyStrategyConfig = StrategyConfig
else:
    AnyStrategyConfig = Union[tuple(STRATEGIES.values())]  # noqa: UP007

SIMULATED_ONLY = {
    kind: f"it is simulated only (rollover simulate --strategies {kind}); to train, use {instead!r}"
    for kind, instead in {
        "sorted": "rollover",
        "tail_rounds": "oversample",
        "threshold": "bounded_async",
        "windowed": "bounded_async",
        "probe": "sync",
        "fast_lane": "concurrency",
    }.items()
}
"""Kinds of ``rollover.sim.strategies``, with what a config that names one is told."""

__all__ = [
    "SIMULATED_ONLY",
    "STRATEGIES",
    "AnyStrategyConfig",
    "April",
    "AprilConfig",
    "BoundedAsync",
    "BoundedAsyncConfig",
    "Concurrency",
    "ConcurrencyConfig",
    "InFlight",
    "InFlightConfig",
    "Knob",
    "Need",
    "Oversample",
    "OversampleConfig",
    "Rollover",
    "RolloverConfig",
    "StrategyConfig",
    "Sync",
    "SyncConfig",
    "TokenBudget",
    "TokenBudgetConfig",
]
