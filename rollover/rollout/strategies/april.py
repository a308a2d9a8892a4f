"""APRIL: active partial rollouts (arXiv 2509.18521).

Launch more groups than a batch needs, stop when the batch is full, park what is unfinished and resume it first in the
next round. Differences from the released code: a parked sample keeps its log-probs and versions, the staleness bound is
a theorem (``rollover.rollout.staleness``), and whole groups beyond the batch are kept and lead the next one. The
released code loses those; ``drop_surplus`` shows what that costs.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollover.rollout.ledger import Ledger
from rollover.rollout.strategies.configured import Configured
from rollover.rollout.strategy import OnFull


@dataclass(frozen=True, slots=True, kw_only=True)
class April(Configured):
    """A round starts with ``launched_groups`` groups, carried-over ones first, and is one burst: while it lasts only a
    dropped group is replaced. Mean head lag is ``launched_groups / batch_size - 1`` versions (Little's law)."""

    drop_surplus: bool
    """Whole groups beyond the batch are dropped as waste, and their prompts with them."""

    on_full = OnFull.PARK

    def groups_to_open(self, ledger: Ledger) -> int:
        return min(self.launched_groups - ledger.num_unconsumed, self.headroom(ledger))

    def surplus(self, ledger: Ledger) -> tuple[int, ...]:
        return tuple(ledger.ready) if self.drop_surplus else ()
