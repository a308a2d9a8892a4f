"""The worker's view of its lease: how long it may believe that it is still a member.

The coordinator counts from the last message that it got; the worker, which cannot know when that was, from the moment
at which it *sent* the last heartbeat that was answered. So the worker's lease never ends after the coordinator's,
and no clocks are compared.
"""

from __future__ import annotations


class LeaseWatch:
    """A lease of ``ttl_s``, begun by a ``Hello`` that was sent at ``sent_s`` and answered.

    Example: with ``ttl_s=15`` and heartbeats sent at 5 and 10, of which the first was answered, it ends at 20.
    """

    def __init__(self, ttl_s: float, sent_s: float) -> None:
        self._ttl_s = ttl_s
        self._answered_s = sent_s
        self._unanswered: dict[int, float] = {}
        """Time at which each heartbeat after the last answered one was sent, by number."""

    @property
    def interval_s(self) -> float:
        """Return the seconds between two heartbeats."""
        return self._ttl_s / 3

    @property
    def ends_s(self) -> float:
        return self._answered_s + self._ttl_s

    def sent(self, number: int, now_s: float) -> None:
        """Take note of a heartbeat."""
        self._unanswered[number] = now_s

    def answered(self, number: int) -> bool:
        """Take note of an answer. Return whether it says something new: not one that came twice or late."""
        if number not in self._unanswered:
            return False
        self._answered_s = self._unanswered[number]
        self._unanswered = {n: sent_s for n, sent_s in self._unanswered.items() if n > number}
        return True
