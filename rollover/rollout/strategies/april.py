"""APRIL: active partial rollouts (arXiv 2509.18521).

Launch more groups than a batch needs, stop when the batch is full, park unfinished samples and resume them first in the
next round. Differences from the released code: a parked sample keeps its log-probs and versions; the staleness bound is
a theorem (``rollover.rollout.staleness``); and the oldest complete groups are trained, where the paper takes the first
to be completed: the throughput is the same, and tokens are younger. Complete groups beyond the batch lead the next one;
the released code loses them. With ``drop_surplus`` both are as released, to show what that costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rollover.engine.base import Capabilities
from rollover.rollout.shared import SharedConfig
from rollover.rollout.strategies.config import OverSampling
from rollover.rollout.strategies.oversample import Oversample
from rollover.rollout.strategy import OnFull

if TYPE_CHECKING:
    from rollover.rollout.records import GroupRecord
    from rollover.rollout.state import View


@dataclass(frozen=True, slots=True, kw_only=True)
class April(Oversample):
    """Starts each round with ``launched_groups`` groups, carried-over ones first; during the round only a dropped group
    is replaced. The mean head lag is ``launched_groups / batch_size - 1`` versions (Little's law).

    Example: ``April(batch_size=4, group_size=2, max_staleness=4, launched_groups=6, drop_surplus=False)`` has a mean
    head lag of 6 / 4 - 1 = 0.5 versions.
    """

    drop_surplus: bool
    """True when batches take groups in the order in which they finish, and complete groups beyond the batch are dropped
    as waste, together with their prompts."""

    on_full = OnFull.PARK
    """Unfinished rollouts are aborted as soon as the batch is full (``Scheduler.decide``) and resumed first."""

    def preference(self, group: GroupRecord) -> int:
        """Prefer the oldest group, or with ``drop_surplus`` the group that became ready first."""
        return 0 if self.drop_surplus else group.group_id

    def surplus(self, view: View) -> tuple[int, ...]:
        return tuple(view.ledger.ready) if self.drop_surplus else ()


@dataclass(frozen=True, kw_only=True)
class AprilConfig(OverSampling):
    """Launches more groups than a batch needs, parks the rest and resumes them first."""

    builds = April

    kind: Literal["april"] = "april"
    drop_surplus: bool = False
    """Take groups in the order in which they finish and throw away those beyond the batch, as APRIL's released code
    does, to show what that costs."""

    def arguments(self, shared: SharedConfig, engine: Capabilities) -> dict[str, Any]:
        return {**super().arguments(shared, engine), "drop_surplus": self.drop_surplus}
