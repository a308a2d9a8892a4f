"""The tokens that a sample is expected to have left, from the lengths of those that have ended."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

WINDOW = 2000
"""Lengths that are remembered: the policy changes, and so do they."""


class RemainingTokens:
    """Mean remainders of the last ``WINDOW`` responses, by what is decoded already.

    Example: after lengths 10, 20 and 300, a sample at 15 tokens has 145 left on average: 5 or 285.
    """

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        self._sorted: list[int] = []
        self._total = 0

    def ended(self, num_tokens: int) -> None:
        """Remember the length of a response that has ended."""
        self._order.append(num_tokens)
        insort(self._sorted, num_tokens)
        self._total += num_tokens
        if len(self._order) > WINDOW:
            oldest = self._order.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
            self._total -= oldest

    def expected(self, num_decoded: int, limit: int) -> float:
        """Return the mean remainder of those longer than ``num_decoded``, at most what ``limit`` leaves.

        Where nothing that long was seen, half of what the limit leaves.
        """
        num_shorter = bisect_right(self._sorted, num_decoded)
        num_longer = len(self._sorted) - num_shorter
        left = max(1, limit - num_decoded)
        if not num_longer:
            return left / 2 if left > 1 else 1.0
        total = self._total if not num_shorter else sum(self._sorted[num_shorter:])
        return min(float(left), total / num_longer - num_decoded)
