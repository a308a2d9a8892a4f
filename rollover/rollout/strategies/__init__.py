"""Rollout strategies, one a page; ``STRATEGIES`` names them."""

from rollover.rollout.strategies.april import April
from rollover.rollout.strategies.bounded_async import BoundedAsync
from rollover.rollout.strategies.concurrency import Concurrency
from rollover.rollout.strategies.oversample import Oversample
from rollover.rollout.strategies.sync import Sync
from rollover.rollout.strategy import Strategy

STRATEGIES: dict[str, type[Strategy]] = {
    "sync": Sync,
    "oversample": Oversample,
    "april": April,
    "concurrency": Concurrency,
    "bounded_async": BoundedAsync,
}

__all__ = ["STRATEGIES", "April", "BoundedAsync", "Concurrency", "Oversample", "Sync"]
