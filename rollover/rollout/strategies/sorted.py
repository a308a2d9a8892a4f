"""Batches in order of length, after SortedRL (arXiv 2603.23414).

Load a pool of several batches, train its groups in the order in which they become whole, short ones first, and load the
next pool only when this one is used up. Of the paper's two ways to treat what an update interrupts, this is the one
that keeps it (its cache); sampling it anew under the new weights would throw tokens away. Simplified: groups, not
samples, are sorted.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollover.rollout.entries import GroupEntry
from rollover.rollout.state import View
from rollover.rollout.strategy import OnFull, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorted(Strategy):
    """A pool holds ``launched_groups`` groups. What is left of it when it no longer fills a batch joins the next."""

    on_full = OnFull.PARK

    def groups_to_open(self, view: View) -> int:
        if view.ledger.num_unconsumed >= self.batch_size:
            return 0
        return min(self.launched_groups - view.ledger.num_unconsumed, self.headroom(view))

    def preference(self, group: GroupEntry) -> int:
        """All alike: ready groups are listed, and so taken, in the order in which they became ready."""
        return 0
