"""Over-sampling with discard: launch more groups than a batch needs and throw the slow ones away.

The baseline of DAPO-style trainers. It shortens the tail by selecting short responses; the discarded prompts return to
the source, so that only responses are biased and not prompts too. Complete groups beyond the batch are not wasted: they
lead the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rollover.rollout.strategies.config import OverSampling
from rollover.rollout.strategy import OnFull, Strategy

if TYPE_CHECKING:
    from rollover.rollout.state import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Oversample(Strategy):
    """A round starts with ``launched_groups`` groups, ready ones included, and gets no new ones until it ends."""

    launched_groups: int
    """Groups in flight at the start of a round."""

    on_full = OnFull.DISCARD

    def groups_to_open(self, view: View) -> int:
        return min(self.launched_groups - view.ledger.num_unconsumed, self.headroom(view))


@dataclass(frozen=True, kw_only=True)
class OversampleConfig(OverSampling):
    """Launches more groups than a batch needs and discards the rest."""

    builds = Oversample

    kind: Literal["oversample"] = "oversample"
