"""Longest first, with the first sample of each group as a probe, after Seer (arXiv 2511.14617).

Siblings have similar lengths. One sample of each group runs ahead of all others; once some have finished, a group's
remaining length is estimated by the longest of its finished samples, and by the cap while there is none. Groups with
the longest estimate go first, so that no long sample starts late. Sampling stays synchronous: the order matters when
there are fewer places than samples. Simplified: requests are not cut into chunks that move between instances, which
needs a cache shared by all of them, and siblings are no source of drafts for speculative decoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rollover.rollout.records import SampleState
from rollover.rollout.state import View
from rollover.rollout.strategies.config import StrategyConfig
from rollover.rollout.strategies.sync import Sync
from rollover.types import SampleId

_FINISHED = (SampleState.FINISHED, SampleState.SCORED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Sync):
    """``sync`` in another order."""

    def samples_to_start(self, view: View) -> list[SampleId]:
        startable = [*view.ledger.parked, *view.ledger.waiting]
        estimates = {i: self._estimate(view, i) for i in {sample_id.group for sample_id in startable}}
        return sorted(startable, key=lambda i: (i.index > 0, -estimates[i.group] if i.index else 0, i))

    def _estimate(self, view: View, group_id: int) -> float:
        """Return the tokens of the group's longest finished sample; infinite before there is one."""
        lengths = [s.num_tokens for s in view.ledger.groups[group_id].samples if s.state in _FINISHED]
        return max(lengths, default=math.inf)


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(StrategyConfig):
    """Runs one sample of each group first, then the longest groups; it has no options."""

    builds = Probe
    on_policy = True

    kind: Literal["probe"] = "probe"
