"""Windowed first in, first out, after Forge (MiniMax, "Forge: Scalable Agent RL Framework and Algorithm", 2026).

Groups queue in order of opening. Only those fewer than ``window`` places behind the head, the oldest that has not been
taken, may be trained, even if later ones are whole already; within the window order is free. Between strictly first in,
first out (a window of 1) and first come, first served, it bounds how far short responses can overtake. Generation never
stops. Simplified: a batch is taken at once when it is complete, instead of piece by piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rollover.engine.base import Capabilities
from rollover.rollout import staleness
from rollover.rollout.shared import SharedConfig
from rollover.rollout.state import View
from rollover.rollout.strategies.bounded_async import BoundedAsync
from rollover.rollout.strategies.config import NumRunning


@dataclass(frozen=True, slots=True, kw_only=True)
class Windowed(BoundedAsync):
    """``bounded_async`` with a narrower choice of batches. It never locks up: the head is open, so it is running or
    first in line to run, or it is ready and can be taken; once all groups are ready, so can all be."""

    window: int
    """Number of groups, counted from the head, that may be trained."""

    def select_batch(self, view: View) -> tuple[int, ...] | None:
        within = self._within_window(view)
        if len(within) < self.batch_size:
            return None
        chosen = staleness.choose_batch(
            view.ledger,
            batch_size=self.batch_size,
            max_staleness=self.max_staleness,
            order=lambda group: group.group_id if group.group_id in within else view.ledger.next_group_id,
        )
        # A group that is due may lie beyond the window: then the batch waits for the head, which started before it.
        return chosen if chosen is not None and within.issuperset(chosen) else None

    def _within_window(self, view: View) -> set[int]:
        """Return the ready groups that can be taken in order of opening: those before the oldest open group are taken
        first, and then it is the head."""
        head = min(view.ledger.open, default=view.ledger.next_group_id)
        return {group_id for group_id in view.ledger.ready if group_id < head + self.window}


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(NumRunning):
    """Limits how far short responses overtake; generation continues while the trainer trains.

    Example: ``WindowedConfig(window_groups=64)`` with batches of 32 groups trains any of the 64 groups from the oldest
    one on.
    """

    builds = Windowed

    kind: Literal["windowed"] = "windowed"
    window_groups: int | None = None
    """Number of groups, counted from the oldest, that may be trained; by default `rollout_batch_size`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "window_groups")

    def arguments(self, shared: SharedConfig, engine: Capabilities) -> dict[str, Any]:
        window = (self.window_groups or shared.rollout_batch_size) * shared.num_siblings
        return {**super().arguments(shared, engine), "window": window}
