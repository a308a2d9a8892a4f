"""Tells whose fault it is that a call failed: its member's, as far as can be told, until another has failed it too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from rollover.swarm.coordinator.machine.members import SwarmMember

NUM_REMEMBERED = 10_000
"""Samples that have failed and of which nothing has come since: some failed at two members, or were dropped, which is
not reported here. One that is forgotten gets one more chance."""


class Blame:
    """Remembers at which member each sample failed first.

    Example: after ``is_members("g4.1.", "laptop")`` returned True, ``is_members("g4.1.", "tower")`` returns False: what
    fails at two members would fail at others too.
    """

    def __init__(self) -> None:
        self._first: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._first)

    def is_members(self, sample_key: str, name: str) -> bool:
        """Record that a call of a sample has failed at a member; return whether it has failed at no other."""
        first = self._first.setdefault(sample_key, name)
        if len(self._first) > NUM_REMEMBERED:
            self._first.popitem(last=False)
        return first == name

    def forget(self, sample_key: str) -> None:
        """Forget a sample that got a token or has ended."""
        self._first.pop(sample_key, None)


def others_do_better(member: SwarmMember, members: Iterable[SwarmMember]) -> bool:
    """Return whether there is another member whose calls do not fail."""
    return any(
        other is not member and other.is_connected and other.ready is not None and not other.num_failures
        for other in members
    )
