"""Asynchronous rollout under a staleness bound, after AReaL (arXiv 2505.24298).

Generation never stops: samples run on while the trainer trains and while weights change. New groups are admitted while
``unconsumed < (max_staleness + version + 1 - consumed batches) * batch_size``, AReaL's gate. AReaL bounds the count and
lets single samples exceed the bound; here the choice of batches makes it hold for every token.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollover.rollout.strategies.concurrency import Concurrency
from rollover.rollout.strategy import OnFull


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedAsync(Concurrency):
    """``Concurrency`` that does not stop for the trainer. With ``max_staleness = 0`` it is synchronous."""

    on_full = OnFull.KEEP
