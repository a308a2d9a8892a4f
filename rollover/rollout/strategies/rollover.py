"""Our own: as much over-sampling as a lag target allows, in bursts that begin with the weights.

What moves the curve of throughput against lag, and what this does about it (``docs/theory.md``):

* A burst. New work starts when new weights do, so that it decodes a whole step before it ages; a constant refill starts
  it at any moment. Below a lag of 2 that is worth a quarter and more.
* Single samples (``rollout.unit = "sample"``). Whole groups wait for their longest sibling, which is 40-48 % of their
  lag. It needs an advantage that compares no siblings (``algorithm.advantage = "history"``).
* The over-sampling follows from the target. Groups leave at N a step, so that their starts are W / N = r - 1 versions
  old in the mean (Little's law), and tokens somewhat less or more: that ratio is measured as the run goes on.

Nothing is discarded, carried-over work goes first, and the staleness bound is a theorem as for ``april``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollover.rollout.ledger import Ledger
from rollover.rollout.strategies.configured import Configured
from rollover.rollout.strategy import OnFull

_RAMP_STEPS = 5
"""Over-sampling grows over the first steps: a sudden surplus would fill the first batches with short responses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollover(Configured):
    """``April`` whose over-sampling is what reaches ``target_lag``."""

    target_lag: float
    """Mean age of trained tokens, in versions."""

    on_full = OnFull.PARK

    def groups_to_open(self, ledger: Ledger) -> int:
        return min(self.launched(ledger) - ledger.num_unconsumed, self.headroom(ledger))

    def launched(self, ledger: Ledger) -> int:
        """Groups in flight at the start of a round."""
        heads_per_token = ledger.lag.heads / ledger.lag.tokens if ledger.lag.tokens > 0 else 1.0
        surplus = min(self.target_lag * heads_per_token, self.max_staleness)
        ramp = min(1.0, (ledger.next_step + 1) / _RAMP_STEPS)
        return math.ceil(self.batch_size * (1 + ramp * surplus))
