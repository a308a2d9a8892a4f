"""The strategies that runs can use. Each has a file, with its options, and a row in ``AnyStrategyConfig``."""

from __future__ import annotations

from rollover.rollout.strategies.april import AprilConfig
from rollover.rollout.strategies.bounded_async import BoundedAsyncConfig
from rollover.rollout.strategies.concurrency import ConcurrencyConfig
from rollover.rollout.strategies.config import StrategyConfig
from rollover.rollout.strategies.inflight import InFlightConfig
from rollover.rollout.strategies.oversample import OversampleConfig
from rollover.rollout.strategies.rollover import RolloverConfig
from rollover.rollout.strategies.sync import SyncConfig
from rollover.rollout.strategies.token_budget import TokenBudgetConfig
from rollover.settings.shape import kinds

AnyStrategyConfig = (
    AprilConfig  #
    | SyncConfig
    | OversampleConfig
    | ConcurrencyConfig
    | BoundedAsyncConfig
    | TokenBudgetConfig
    | InFlightConfig
    | RolloverConfig
)
"""Options are distinguished by ``kind``; the first is used when a config names none."""

STRATEGIES: dict[str, type[StrategyConfig]] = kinds(AnyStrategyConfig)
"""Strategies that can train: the class of each one's options, by kind.

Examples:
    >>> sorted(STRATEGIES)[:3]
    ['april', 'bounded_async', 'concurrency']
    >>> STRATEGIES["april"](over_sampling_batch_size=48).kind
    'april'
"""

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
"""Kinds that exist only in ``rollover.sim.strategies``, with the advice for a config that names one. They are listed
here because this package may not import that one; a test keeps both lists equal."""


def no_in_flight_update(strategy: str, engine: str) -> str:
    """Return the message that an engine of the kind ``engine`` cannot do what the strategy of the kind ``strategy``
    needs: change weights under running samples."""
    others = ", ".join(kind for kind, each in STRATEGIES.items() if not each.needs_in_flight_update)
    return (
        f"rollout.strategy {strategy!r} loads weights while samples are running, and this engine (engine.kind"
        f" {engine!r}) cannot do that: set engine.kv_on_update = 'keep', or choose a strategy that does not need it:"
        f" {others}"
    )
