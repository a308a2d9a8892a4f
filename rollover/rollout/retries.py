"""Retries of failed generation calls: how often a sample is tried again, and how long it waits before that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from rollover.types import SampleId

_FIRST_BACK_OFF_S, _MAX_BACK_OFF_S = 0.1, 10.0


class Retries:
    """Counts for each sample the calls that failed since its last token."""

    def __init__(self, max_retries: int) -> None:
        self._max_retries = max_retries
        self._num_failures: Counter[SampleId] = Counter()
        self._in_a_row: set[SampleId] = set()
        """Samples that failed since any of them got a token."""

    def failed(self, sample_id: SampleId) -> bool:
        """Count a failed call; return whether to try the sample again."""
        self._num_failures[sample_id] += 1
        self._in_a_row.add(sample_id)
        return self._num_failures[sample_id] <= self._max_retries

    def decoded(self, sample_id: SampleId) -> None:
        """Forget the failures of a sample that got a token."""
        self._num_failures.pop(sample_id, None)
        self._in_a_row.clear()

    def back_off_s(self, sample_id: SampleId) -> float:
        """Return how long the sample's next call must wait: twice as long after each failure, 10 s at most."""
        num_failures = self._num_failures[sample_id]
        return min(_FIRST_BACK_OFF_S * 2.0 ** min(num_failures - 1, 63), _MAX_BACK_OFF_S) if num_failures else 0.0

    def all_failing(self, sample_ids: Set[SampleId]) -> bool:
        """Return whether each of the samples that run has failed since its last token; if none runs, whether several
        samples have failed in a row."""
        return sample_ids <= self._num_failures.keys() if sample_ids else len(self._in_a_row) > 1
