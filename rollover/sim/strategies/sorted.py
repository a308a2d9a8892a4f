"""Batches in order of length, after SortedRL (arXiv 2603.23414).

Load a pool of several batches, train its groups in the order in which they become whole, short ones first, and load the
next pool only when this one is used up. Of the paper's two ways to treat what an update interrupts, this is the one
that keeps it (its cache); sampling it again under the new weights would throw tokens away. Simplified: groups, not
samples, are sorted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rollover.rollout.records import GroupRecord
from rollover.rollout.state import View
from rollover.rollout.strategies.config import OverSampling
from rollover.rollout.strategies.oversample import Oversample
from rollover.rollout.strategy import OnFull


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorted(Oversample):
    """A pool holds ``launched_groups`` groups. What is left of it when it no longer fills a batch joins the next."""

    on_full = OnFull.PARK

    def groups_to_open(self, view: View) -> int:
        if view.ledger.num_unconsumed >= self.batch_size:
            return 0
        return Oversample.groups_to_open(self, view)

    def preference(self, group: GroupRecord) -> int:
        """Treat all groups alike: ready groups are listed, and so taken, in the order in which they became ready."""
        return 0


@dataclass(frozen=True, kw_only=True)
class SortedConfig(OverSampling):
    """Loads a pool of several batches and trains its short groups first.

    Example: ``SortedConfig(over_sampling_batch_size=64)`` loads pools of four batches of 16 groups.
    """

    builds = Sorted
    knob = replace(OverSampling.knob, values=(2.0, 3.0, 4.0))

    kind: Literal["sorted"] = "sorted"
