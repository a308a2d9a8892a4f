"""A quota per weight update, after the staleness threshold of verl's fully asynchronous trainer.

Between two updates at most ``(1 + s) N`` groups may be open or opened, those carried over included. Since batch *k* is
consumed before version *k + 1* is published, that is the same as ``N (version + 1 + s - step)`` unconsumed groups at
any time: the gate of ``bounded_async`` for a staleness that need not be whole. Simplified: weights are published after
every batch. verl's quota bounds what is in flight and not the age of a sample; here ``max_staleness`` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollover.rollout.state import View
from rollover.rollout.strategies.bounded_async import BoundedAsync
from rollover.rollout.strategies.concurrency import Concurrency
from rollover.rollout.strategies.configured import Configured


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold(Configured, BoundedAsync):
    """``num_running`` samples decode while the quota lasts; generation goes on while the trainer trains."""

    threshold: float
    """Groups opened ahead, in batches."""

    def groups_to_open(self, view: View) -> int:
        batches = view.ledger.policy_version + 1 + self.threshold - view.ledger.next_step
        quota = math.floor(self.batch_size * batches) - view.ledger.num_unconsumed
        return min(Concurrency.groups_to_open(self, view), quota)
