"""Simulated rewards: 1 for a right response, 0 for a wrong one, with prompts that are easier or harder than others.

    right if  sqrt(icc) d_p + sqrt(1 - icc) e < Phi^-1(accuracy),    d_p, e ~ N(0, 1)

The mean over prompts is ``accuracy`` for every ``icc``, the intraclass correlation of what decides a response. The
difficulty d_p of a prompt may be correlated with how long its responses are, compared with other prompts' responses.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from statistics import NormalDist

from rollover.sim.scenario import Scenario
from rollover.workload.base import Workload

_NORMAL = NormalDist()
_COMPARED = 1024
"""Prompts whose lengths a prompt is compared with."""


class Accuracies:
    """The probability by prompt that a response is right: a pure function of seed and prompt.

    Example: with ``accuracy=0.5, accuracy_icc=0.0`` it is 0.5 for every prompt; with ``accuracy_icc=1.0`` half of the
    prompts are always solved and half never.
    """

    def __init__(self, scenario: Scenario, workload: Workload, group_size: int, seed: int) -> None:
        self._mean, self._icc = scenario.accuracy, scenario.accuracy_icc
        self._by_length = scenario.accuracy_length_correlation
        self._workload = workload
        self._group_size = group_size
        self._seed = seed
        self._known: dict[int, float] = {}

    def of_prompt(self, index: int) -> float:
        """Return the probability of the ``index``-th prompt."""
        if not 0 < self._mean < 1 or not self._icc:
            return self._mean
        if index not in self._known:
            self._known[index] = self._drawn(index)
        return self._known[index]

    def _drawn(self, index: int) -> float:
        easier = math.sqrt(1 - self._by_length**2) * random.Random(f"{self._seed}/{index}").gauss()
        if self._by_length:
            easier += self._by_length * self._length_score(index)
        margin = _NORMAL.inv_cdf(self._mean) + math.sqrt(self._icc) * easier
        return _NORMAL.cdf(margin / math.sqrt(1 - self._icc)) if self._icc < 1 else float(margin > 0)

    def _length_score(self, index: int) -> float:
        """Return how long the prompt's responses are: the normal quantile of their rank among other prompts'."""
        rank = bisect_left(self._others, self._log_length(index))
        return _NORMAL.inv_cdf((rank + 0.5) / (len(self._others) + 1))

    @cached_property
    def _others(self) -> Sequence[float]:
        return sorted(self._log_length(i) for i in range(_COMPARED))

    def _log_length(self, index: int) -> float:
        return statistics.fmean(map(math.log, self._workload.group_lengths(index, self._group_size)))
