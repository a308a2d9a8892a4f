"""Asynchronous rollout under a staleness bound, after AReaL (arXiv 2505.24298).

Generation never stops: samples keep running while the trainer trains and while weights change. New groups are admitted
while ``unconsumed < (max_staleness + version + 1 - consumed batches) * batch_size``, AReaL's gate. AReaL bounds the
count and lets single samples exceed the bound; here the choice of batches makes it hold for every token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollover.rollout.shared import SharedConfig
from rollover.rollout.strategies.concurrency import Concurrency
from rollover.rollout.strategies.config import Knob, NumRunning
from rollover.rollout.strategy import OnFull


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedAsync(Concurrency):
    """``Concurrency`` that does not stop for the trainer. With ``max_staleness = 0`` it is synchronous.

    Example: ``BoundedAsync(batch_size=4, group_size=2, max_staleness=2, num_running=16)`` admits groups at version 3,
    after three consumed batches, while fewer than (2 + 3 + 1 - 3) * 4 = 12 are unconsumed.
    """

    on_full = OnFull.KEEP


@dataclass(frozen=True, kw_only=True)
class BoundedAsyncConfig(NumRunning):
    """Keeps a fixed number of samples in flight, even while the trainer trains."""

    builds = BoundedAsync
    knob = Knob(key="max_staleness", symbol="S", scale="plain", values=(1, 2, 3, 4, 6))

    kind: Literal["bounded_async"] = "bounded_async"

    def knob_value(self, shared: SharedConfig) -> float:
        return self.staleness_bound(shared)
