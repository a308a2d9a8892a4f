"""Tail batching, after RollPacker (arXiv 2509.21009).

A short round launches more groups than a batch needs, trains the first that are whole and discards the others, whose
prompts queue up. Once they fill a batch, a long round runs just those prompts, all to their end. Every batch is
sampled, and prompts with long responses are trained as often as others. Simplified: the paper also launches more
samples per prompt and keeps the first to finish; that is left out, since it selects the short responses of each prompt,
and a group has a fixed size here. Its parallelism that adapts to the round belongs to the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollover.rollout.state import View
from rollover.rollout.strategies.config import OverSampling
from rollover.rollout.strategies.oversample import Oversample


@dataclass(frozen=True, slots=True, kw_only=True)
class TailRounds(Oversample):
    """A short round launches ``launched_groups``, a long one ``batch_size`` groups. Nothing that has a token is carried
    over, except groups whose rewards are late."""

    def groups_to_open(self, view: View) -> int:
        if view.ledger.num_unconsumed >= self.batch_size:
            return 0
        is_short = not self.takes_returned(view) and not self._has_begun(view)
        wanted = self.launched_groups if is_short else self.batch_size
        return min(wanted - view.ledger.num_unconsumed, self.headroom(view))

    def takes_returned(self, view: View) -> bool:
        """Return whether the prompts of discarded groups go out again: they do when they fill a batch; until then new
        ones are drawn."""
        return len(view.ledger.returned) >= self.batch_size

    def surplus(self, view: View) -> tuple[int, ...]:
        """Discard whole groups beyond the batch like the others: the next round has newer weights."""
        return tuple(view.ledger.ready)

    def _has_begun(self, view: View) -> bool:
        """Return whether this round has started a group; what a filter or a failure drops of it is replaced, no
        more."""
        return any(g.start_version == view.ledger.policy_version for g in view.ledger.unconsumed())


@dataclass(frozen=True, kw_only=True)
class TailRoundsConfig(OverSampling):
    """Discards what a short round leaves, and runs the discarded prompts by themselves.

    Example: ``TailRoundsConfig(over_sampling_batch_size=40)`` with batches of 32 groups discards 8 groups of each short
    round.
    """

    builds = TailRounds

    kind: Literal["tail_rounds"] = "tail_rounds"
