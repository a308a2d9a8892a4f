"""Forecasts for the placing rule: how many tokens a call has left, and when a training step waits for it.

A group that starts under version ``v`` is trained by step ``v + S`` at the latest, where ``S`` is the staleness bound
(``rollover.rollout.staleness``). That step begins once version ``v + S`` is published, and waits for the group from
then on. The time until then is the number of publications still to come, times what one has taken lately.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low

WINDOW = 2000
"""Lengths that are remembered: the policy changes, and so do they."""
NUM_INTERVALS = 8
"""Intervals between publications whose median is the pace: a few of them may hold an evaluation or a checkpoint."""


class RemainingTokens:
    """Mean remainders of the last ``WINDOW`` responses, by what is decoded already.

    Example: after lengths 10, 20 and 300, a sample at 15 tokens has 145 left on average: 5 or 285.
    """

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        self._sorted: list[int] = []
        self._total = 0

    def ended(self, num_tokens: int) -> None:
        self._order.append(num_tokens)
        insort(self._sorted, num_tokens)
        self._total += num_tokens
        if len(self._order) > WINDOW:
            oldest = self._order.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
            self._total -= oldest

    def expected(self, num_decoded: int, limit: int) -> float:
        """Return the mean remainder of those longer than ``num_decoded``, at most what ``limit`` leaves; half of what
        it leaves if none was that long."""
        num_shorter = bisect_right(self._sorted, num_decoded)
        num_longer = len(self._sorted) - num_shorter
        left = max(1, limit - num_decoded)
        if not num_longer:
            return left / 2 if left > 1 else 1.0
        total = self._total if not num_shorter else sum(self._sorted[num_shorter:])
        return min(float(left), total / num_longer - num_decoded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """The time left for a call, which may depend on the version under which its group starts."""

    due_version: int
    """The training step that waits for the response begins when this version is published."""
    left_s: float
    """Until then; infinite while the pace is not known."""
    start_version: int = 0
    """The version under which the group has to start for that."""
    per_version_s: float = 0.0
    """Seconds that each older version takes off; 0 for a group that has started, since its version is fixed."""

    def under(self, version: int) -> float:
        """Return the seconds left to a member that serves ``version``."""
        return max(0.0, self.left_s - (self.start_version - version) * self.per_version_s)


class Pace:
    """The time that a training step takes, from the publications of the last ones."""

    def __init__(self) -> None:
        self._published: deque[tuple[int, float]] = deque(maxlen=NUM_INTERVALS + 1)
        """Version and time of the last publications, the newest last."""

    def published(self, version: int, now_s: float) -> None:
        """Record a publication. A version may be skipped; a repetition says nothing new."""
        if not self._published or version > self._published[-1][0]:
            self._published.append((version, now_s))

    def since_s(self, now_s: float) -> float:
        return now_s - self._published[-1][1] if self._published else now_s

    @property
    def step_s(self) -> float:
        """Return the seconds from one version to the next; infinite before the second publication."""
        intervals = [(t - s) / (v - u) for (u, s), (v, t) in pairwise(self._published)]
        return median_low(intervals) if intervals else math.inf

    def until_s(self, version: int, now_s: float) -> float:
        """Return the seconds until ``version`` is published, 0 when it is or is overdue."""
        newest, at_s = self._published[-1] if self._published else (-1, 0.0)
        if version <= newest:
            return 0.0
        if (step_s := self.step_s) == math.inf:
            return math.inf
        return max(0.0, at_s + step_s - now_s) + (version - newest - 1) * step_s

    def of_started(self, due_version: int, now_s: float) -> Deadline:
        """Return the deadline of a call whose group is waited for once ``due_version`` is published."""
        return Deadline(due_version=due_version, left_s=self.until_s(due_version, now_s))

    def of_first(self, newest: int, max_staleness: int, now_s: float) -> Deadline:
        """Return the deadline of a call with which a group starts, under whichever version its member serves."""
        due_version, step_s = newest + max_staleness, self.step_s
        return Deadline(
            due_version=due_version,
            left_s=self.until_s(due_version, now_s),
            start_version=newest,
            per_version_s=step_s if step_s < math.inf else 0.0,
        )
