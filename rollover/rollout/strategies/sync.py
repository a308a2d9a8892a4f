"""Synchronous rollout: launch the batch, wait for its last token. The baseline of all other strategies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rollover.rollout.strategies.config import StrategyConfig
from rollover.rollout.strategy import OnFull, Strategy

if TYPE_CHECKING:
    from rollover.rollout.state import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync(Strategy):
    """Carries nothing over: every token is trained by the weights that sampled it. A group that is dropped by a filter
    or a failure is replaced at once."""

    on_full = OnFull.WAIT

    def groups_to_open(self, view: View) -> int:
        return self.batch_size - view.ledger.num_unconsumed


@dataclass(frozen=True, kw_only=True)
class SyncConfig(StrategyConfig):
    """Waits for the last token of each batch. It has no options."""

    builds = Sync
    on_policy = True

    kind: Literal["sync"] = "sync"
