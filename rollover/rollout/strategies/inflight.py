"""Weights that change in flight, after PipelineRL (arXiv 2509.19128).

The number of running samples is constant: one that finishes makes room for the next at once, nothing is ever stopped,
and new weights are loaded under the running samples, which keep their cache. The trainer takes what is whole, first
come, first served. Simplified: groups, not samples, are taken. The paper lets the lag come out as it may; here
``max_staleness`` caps it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollover.rollout.entries import GroupEntry
from rollover.rollout.strategies.bounded_async import BoundedAsync
from rollover.rollout.strategies.config import NumRunning


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight(BoundedAsync):
    """``bounded_async`` for engines that load weights under running samples, with batches in order of finishing."""

    def preference(self, group: GroupEntry) -> int:
        """Treat all groups alike: ready groups are listed, and so taken, in the order in which they became ready."""
        return 0


@dataclass(frozen=True, kw_only=True)
class InFlightConfig(NumRunning):
    """Keeps a fixed number of samples in flight and changes the weights under them."""

    builds = InFlight
    needs_in_flight_update = True

    kind: Literal["inflight"] = "inflight"
