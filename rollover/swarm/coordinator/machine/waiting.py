"""The calls that no member has yet, kept so that those which a member could take are found without looking at all."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from operator import itemgetter

from rollover.swarm.coordinator.machine.swarm_call import SwarmCall

_arrival = itemgetter(1)


class WaitingCalls:
    """The waiting calls in order of arrival, by the oldest version that each accepts and by sample.

    Example: after ``add("a#1.", call)`` of a call that accepts version 3 and newer, ``versions`` is ``[3]``, and
    ``accepting([3])`` yields ``"a#1."`` until ``discard("a#1.", call)``.
    """

    def __init__(self) -> None:
        self._by_version: dict[int, dict[str, int]] = {}
        """The number of each call's arrival, by its id."""
        self._of_sample: dict[str, str] = {}
        """Call by sample key."""
        self._num = self._num_arrived = 0

    def __len__(self) -> int:
        return self._num

    @property
    def versions(self) -> list[int]:
        """Return the versions that are the oldest for some call."""
        return list(self._by_version)

    def of_sample(self, sample_key: str) -> str | None:
        """Return the call of a sample."""
        return self._of_sample.get(sample_key)

    def accepting(self, versions: Iterable[int]) -> Iterator[str]:
        """Yield the calls that were waiting when this began and for which one of ``versions`` is the oldest, in order
        of arrival. Calls may be given away meanwhile."""
        for call_id, _ in heapq.merge(*(list(self._by_version[v].items()) for v in versions), key=_arrival):
            yield call_id

    def add(self, call_id: str, call: SwarmCall) -> None:
        self._num_arrived += 1
        self._num += 1
        self._by_version.setdefault(call.least_version, {})[call_id] = self._num_arrived
        self._of_sample[call.request.sample_key] = call_id

    def discard(self, call_id: str, call: SwarmCall) -> None:
        """Forget a call, if it is among those that wait."""
        calls = self._by_version.get(call.least_version, {})
        if calls.pop(call_id, None) is None:
            return
        self._num -= 1
        if not calls:
            del self._by_version[call.least_version]
        if self._of_sample.get(call.request.sample_key) == call_id:
            del self._of_sample[call.request.sample_key]
