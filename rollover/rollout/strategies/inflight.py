"""Weights that change in flight, after PipelineRL (arXiv 2509.19128).

The number of running samples is constant: a finished sample immediately makes room for the next, nothing is ever
stopped, and new weights are loaded under the running samples, which keep their cache. The trainer takes groups in the
order in which they are completed. Simplified: groups, not samples, are taken. The paper does not limit the lag; here
``max_staleness`` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rollover.rollout.strategies.bounded_async import BoundedAsync
from rollover.rollout.strategies.config import NumRunning

if TYPE_CHECKING:
    from rollover.rollout.records import GroupRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight(BoundedAsync):
    """``bounded_async`` for engines that load weights under running samples, with batches in order of finishing."""

    def preference(self, group: GroupRecord) -> int:
        """Treat all groups alike: ready groups are listed, and so taken, in the order in which they became ready."""
        return 0


@dataclass(frozen=True, kw_only=True)
class InFlightConfig(NumRunning):
    """Keeps a fixed number of samples in flight and changes the weights under them."""

    builds = InFlight
    needs_in_flight_update = True

    kind: Literal["inflight"] = "inflight"
