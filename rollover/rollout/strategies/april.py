"""APRIL: active partial rollouts (arXiv 2509.18521).

Launch more groups than a batch needs, stop when the batch is full, park what is unfinished and resume it first in the
next round. Differences from the released code: whole groups beyond the batch are kept and lead the next one, a parked
sample keeps its log-probs and versions, and the staleness bound is a theorem (``rollover.rollout.staleness``).
"""

from __future__ import annotations

from dataclasses import dataclass

from rollover.rollout.ledger import Ledger
from rollover.rollout.strategy import OnFull, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class April(Strategy):
    """A round starts with ``launched_groups`` groups, carried-over ones first, and is one burst: while it lasts only a
    dropped group is replaced. Mean head lag is ``launched_groups / batch_size - 1`` versions (Little's law)."""

    on_full = OnFull.PARK

    def groups_to_open(self, ledger: Ledger) -> int:
        return min(self.launched_groups - ledger.num_unconsumed, self.headroom(ledger))
