"""A quota per weight update, after the staleness threshold of verl's fully asynchronous trainer.

Between two updates at most ``(1 + s) N`` groups may be open or opened, those carried over included. Since batch *k* is
consumed before version *k + 1* is published, that is the same as ``N (version + 1 + s - step)`` unconsumed groups at
any time: the gate of ``bounded_async`` for a staleness that need not be whole. Simplified: weights are published after
every batch. verl's quota bounds what is in flight and not the staleness of a sample; here ``max_staleness`` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from rollover.engine.base import Capabilities
from rollover.rollout.shared import SharedConfig
from rollover.rollout.state import View
from rollover.rollout.strategies.bounded_async import BoundedAsync
from rollover.rollout.strategies.concurrency import Concurrency
from rollover.rollout.strategies.config import Knob, NumRunning


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold(BoundedAsync):
    """``num_running`` samples decode while the quota lasts; generation continues while the trainer trains."""

    threshold: float
    """Number of groups opened ahead, in batches."""

    def groups_to_open(self, view: View) -> int:
        batches = view.ledger.policy_version + 1 + self.threshold - view.ledger.next_step
        quota = math.floor(self.batch_size * batches) - view.ledger.num_unconsumed
        return min(Concurrency.groups_to_open(self, view), quota)


@dataclass(frozen=True, kw_only=True)
class ThresholdConfig(NumRunning):
    """Bounds the groups opened between two weight updates.

    Example: ``ThresholdConfig(staleness_threshold=0.5)`` needs a ``max_staleness`` of at least 1.
    """

    builds = Threshold
    knob = Knob(key="staleness_threshold", symbol="s", scale="plain", values=(0.25, 0.5, 1.0, 2.0, 3.0))

    kind: Literal["threshold"] = "threshold"
    staleness_threshold: float = 0.5
    """Groups that are opened ahead of a batch, in batches: between two weight updates at most
    `1 + staleness_threshold` batches are open or opened."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "staleness_threshold")

    def staleness_needed(self, shared: SharedConfig) -> int:
        return math.ceil(self.staleness_threshold)

    def check(self, shared: SharedConfig) -> None:
        super().check(shared)
        if (bound := self.staleness_bound(shared)) < self.staleness_needed(shared):
            raise ValueError(
                f"rollout.max_staleness ({bound}) is below {self.staleness_needed(shared)}, which a threshold of"
                f" {self.staleness_threshold:g} for batches of {shared.rollout_batch_size} needs;"
                " raise it, or lower rollout.strategy.staleness_threshold"
            )

    def arguments(self, shared: SharedConfig, engine: Capabilities) -> dict[str, Any]:
        return {**super().arguments(shared, engine), "threshold": self.staleness_threshold}
