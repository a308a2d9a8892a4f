"""Remembers the rewards before a sample began: a baseline that does not depend on the sample.

A policy gradient stays unbiased under any baseline that does not depend on the response it is subtracted from:
E[b grad log pi(y)] = b E[grad log pi(y)] = 0. The mean of the siblings that happen to be scored when a sample is
consumed does depend on it: the longer the response, the more and the longer of its siblings are among them. Rewards
known when the sample was opened do not, in whatever order samples finish. Rewards of earlier passes over the same row
count according to their number, and the others of its source for the rest.

Rewards are what the algorithm compares, including its shaping (a punishment for length, say): a baseline of
unshaped rewards would lie above or below all of them. The history is worth as many siblings as it has rewards, and
never more than an ordinary group has: ``rollover.algorithms.advantages`` describes how the advantage uses that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rollover.batch import Baseline
from rollover.types import MAX_REWARD, Prompt

_MEMORY = 256
"""Number of rewards after which one counts e times less, as the policy changes."""
_PRIOR = 4.0
"""Number of rewards of its own row that weigh as much as the rewards of its whole source."""
_MOST_ROWS = 2**17
"""Rows that are remembered; an endless source never draws one again."""
_MAX_SIBLINGS = 7
"""Number of siblings of a sample in a group of eight, the most common size."""


@dataclass(slots=True)
class _Moments:
    """Exponentially forgetting count, mean and centred second moment (Welford's recurrence): for equal rewards the mean
    is that reward and the variance 0, both exactly, however large it is."""

    weight: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""

    def add(self, reward: float, memory: float) -> None:
        keep = math.exp(-1 / memory)
        self.weight = keep * self.weight + 1
        distance = reward - self.mean
        self.mean += distance / self.weight
        self.squares = keep * self.squares + distance * (reward - self.mean)

    @property
    def variance(self) -> float:
        return self.squares / self.weight if self.weight else 0.0


@dataclass(slots=True)
class RewardHistory:
    """Rewards by source and by row, in the order in which the ledger recorded them.

    Example: after rewards of 1.0 and 0.0 for one prompt, its ``baseline`` has a mean of 0.498, a standard deviation of
    0.5 and is worth 1.996 siblings.
    """

    sources: dict[str, _Moments] = field(default_factory=dict)
    rows: dict[str, _Moments] = field(default_factory=dict)

    def add(self, prompt: Prompt, reward: float) -> None:
        """Add a reward, unless no trainer can hold it: journals of earlier versions may have such rewards."""
        if abs(reward) <= MAX_REWARD:
            self.sources.setdefault(prompt.source, _Moments()).add(reward, _MEMORY)
            row = self.rows[_row(prompt)] = self.rows.pop(_row(prompt), _Moments())
            row.add(reward, 16 * _PRIOR)
            if len(self.rows) > _MOST_ROWS:
                del self.rows[next(iter(self.rows))]

    def baseline(self, prompt: Prompt) -> Baseline:
        """Return the baseline for a sample of ``prompt`` that begins now."""
        source, row = self.sources.get(prompt.source, _Moments()), self.rows.get(_row(prompt), _Moments())
        mean = source.mean + row.weight / (_PRIOR + row.weight) * (row.mean - source.mean)
        return Baseline(mean=mean, std=math.sqrt(source.variance), num_siblings=min(source.weight, _MAX_SIBLINGS))


def _row(prompt: Prompt) -> str:
    """Return the row of the dataset, without the pass over it."""
    return prompt.prompt_id.rpartition("@")[0]
