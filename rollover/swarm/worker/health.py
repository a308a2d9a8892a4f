"""Tells an engine that fails a call now and then from one that is broken for good. Pure; times are given."""

from __future__ import annotations

_MIN_FAILURES = 5
"""Failures in a row before an engine is called broken."""


class EngineHealth:
    """Counts failures in a row, over all calls of an engine.

    Args:
        broken_after_s: seconds of failures without a token in between after which an engine is broken.

    Example: five calls that fail within a second are a bad moment; seven within two minutes, and no token, are the end.
    """

    def __init__(self, broken_after_s: float) -> None:
        self._broken_after_s = broken_after_s
        self._failing_since_s: float | None = None
        self._num_failures = 0
        self.broken: str | None = None
        """The reason why the engine is permanently broken, if it is."""

    def decoded(self) -> None:
        """Take note of a token."""
        self._failing_since_s, self._num_failures = None, 0

    def failed(self, reason: str, now_s: float) -> None:
        """Take note of a failure."""
        self._num_failures += 1
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        failing_s = now_s - self._failing_since_s
        if self._num_failures >= _MIN_FAILURES and failing_s >= self._broken_after_s:
            self.broken = (
                f"the engine has failed {self._num_failures} calls in {failing_s:.0f} s and given no token: {reason}"
            )
