"""How fast this machine is, and how long a test therefore waits for what must happen."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

LOOP_S = 0.007
"""Processor time of ``_loop`` on the reference machine, in seconds."""


def slowness(clock: Callable[[], float] = time.process_time) -> float:
    """Return how many times longer than the reference machine this one takes now; at least 1."""
    return max(1.0, min(_loop(clock) for _ in range(3)) / LOOP_S)


def within(seconds: float) -> float:
    """Return the limit of a wait that takes at most ``seconds`` on the reference machine.

    A limit ends a test that hangs, so it can be generous: thrice what a machine as busy as at the session's start needs.
    """
    return 3 * seconds * _busyness()


@cache
def _busyness() -> float:
    """Return the slowness by the clock on the wall, which also counts what other processes take."""
    return slowness(time.perf_counter)


def _loop(clock: Callable[[], float]) -> float:
    start_s, total = clock(), 0
    for number in range(200_000):
        total += number % 7
    return clock() - start_s
