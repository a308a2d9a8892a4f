"""A fast lane for the oldest samples, after Laminar (arXiv 2510.12633) and StreamRL (arXiv 2504.15930).

What holds a batch up is a few long samples, and in a large decoding batch each of their tokens takes long. The oldest
samples therefore run on a replica that is kept lightly loaded. Simplified: Laminar moves the rest of a replica that
runs empty and updates each replica on its own; StreamRL sends prompts that a trained ranker predicts to be long. Here
age stands for length, and a sample changes lanes when it is resumed, not while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rollover.engine.base import Capabilities
from rollover.rollout.records import SampleState
from rollover.rollout.shared import SharedConfig
from rollover.rollout.state import View
from rollover.rollout.strategies.concurrency import Concurrency
from rollover.rollout.strategies.config import NumRunning
from rollover.types import SampleId

_ACTIVE = (SampleState.WAITING, SampleState.RUNNING, SampleState.PARKED)


@dataclass(frozen=True, slots=True, kw_only=True)
class FastLane(Concurrency):
    """``concurrency``, with the ``fast_lane`` oldest unfinished samples in the lane."""

    fast_lane: int
    """Maximum number of samples in the fast lane."""

    def wants_fast_lane(self, view: View, sample_id: SampleId) -> bool:
        """Return whether fewer than ``fast_lane`` unfinished samples are older."""
        num_older = 0
        for group in view.ledger.open.values():  # in order of opening
            if group.group_id > sample_id.group or num_older >= self.fast_lane:
                break
            siblings = group.samples[: sample_id.index] if group.group_id == sample_id.group else group.samples
            num_older += sum(s.state in _ACTIVE for s in siblings)
        return num_older < self.fast_lane


@dataclass(frozen=True, kw_only=True)
class FastLaneConfig(NumRunning):
    """Keeps a fixed number of samples in flight, the oldest of them on a lightly loaded replica.

    Example: with batches of 32 groups of 8 samples, ``FastLaneConfig()`` keeps the 32 oldest samples in the lane.
    """

    builds = FastLane

    kind: Literal["fast_lane"] = "fast_lane"
    fast_lane_samples: int | None = None
    """Number of oldest samples that run on the lightly loaded replica; by default an eighth of a batch's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "fast_lane_samples")

    def arguments(self, shared: SharedConfig, engine: Capabilities) -> dict[str, Any]:
        samples = self.fast_lane_samples or -(-shared.rollout_batch_size * shared.group_size // 8)
        return {**super().arguments(shared, engine), "fast_lane": samples}
