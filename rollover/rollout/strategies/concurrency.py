"""Concurrency-controlled partial rollout, after CoPRIS (arXiv 2511.05589).

Keep a fixed number of samples in flight: each finished sample makes room for the next, a parked one before a new one.
Stop when the batch is full and park the rest. Simplified: groups are admitted whole, so that up to ``group_size - 1``
samples may wait for a place.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

from rollover.rollout.strategies.config import NumRunning
from rollover.rollout.strategy import OnFull, Strategy
from rollover.types import SampleId

if TYPE_CHECKING:
    from rollover.rollout.state import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency(Strategy):
    """Decodes ``num_running`` samples at all times while the bound leaves room for new groups."""

    num_running: int
    """Maximum number of samples in flight."""

    on_full = OnFull.PARK

    def groups_to_open(self, view: View) -> int:
        missing = self.num_running - view.ledger.num_active
        return min(-(-missing // self.group_size), self.headroom(view)) if missing > 0 else 0

    def samples_to_start(self, view: View) -> list[SampleId]:
        room = self.num_running - len(view.ledger.running)
        if room <= 0:
            return []
        # Unqualified super() does not work in a dataclass with slots, because the decorator creates a new class.
        return list(islice(Strategy.samples_to_start(self, view), room))


@dataclass(frozen=True, kw_only=True)
class ConcurrencyConfig(NumRunning):
    """Keeps a fixed number of samples in flight until the batch is full."""

    builds = Concurrency

    kind: Literal["concurrency"] = "concurrency"
