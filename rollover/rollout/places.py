"""The places of an engine whose members come and go, in the scheduler's terms."""

from __future__ import annotations

from rollover.engine.base import CallPlacement, FirstCall
from rollover.rollout.generation import is_begun_by_environment, sample_key
from rollover.rollout.ledger import Ledger
from rollover.types import SampleId, SamplingParams


class EnginePlaces:
    """Implements the scheduler's ``SamplePlacement`` for an engine that decides where calls run.

    Args:
        ledger: of the samples.
        max_staleness: the strategy's bound, from which the engine knows when a training step waits for a sample.
    """

    def __init__(self, placement: CallPlacement, ledger: Ledger, sampling: SamplingParams, max_staleness: int) -> None:
        self._placement, self._ledger = placement, ledger
        self._max_new_tokens, self._max_staleness = sampling.max_new_tokens, max_staleness

    def room(self) -> int:
        return self._placement.room()

    def takes_one(self, least_version: int, num_waiting: int) -> bool:
        return self._placement.takes_one(self._call(least_version, num_waiting))

    def reserve(self, sample_id: SampleId, least_version: int, num_waiting: int) -> int | None:
        trajectory = self._ledger.sample(sample_id).trajectory
        turn = len(trajectory.observations) + is_begun_by_environment(trajectory)  # whose call is the next one
        return self._placement.reserve(sample_key(sample_id, turn), self._call(least_version, num_waiting))

    def _call(self, least_version: int, num_waiting: int) -> FirstCall:
        return FirstCall(least_version, self._max_new_tokens, num_waiting, self._max_staleness)
