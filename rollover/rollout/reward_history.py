"""Remembers what rewards were like before a sample began: a baseline that knows nothing of the sample.

A policy gradient stays unbiased under any baseline that does not depend on the response it is subtracted from:
E[b grad log pi(y)] = b E[grad log pi(y)] = 0. The mean of the siblings that happen to be scored when a sample is
consumed does depend on it: the longer the response, the more and the longer of its siblings are among them. What was
known when the sample was opened does not, whatever finishes when. Rewards of earlier passes over the same row count
for what they tell, the others of its source for the rest.

Rewards are those that the algorithm compares, its shaping (a punishment for length, say) included: a baseline of
others would stand above or below all of them. The history is worth as many siblings as it knows rewards, and never
more than those of an ordinary group: what the advantage makes of that is said in
``rollover.algorithms.advantages``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rollover.types import MAX_REWARD, Baseline, Prompt

_MEMORY = 256
"""Rewards after which one counts e times less: the policy moves on."""
_PRIOR = 4.0
"""Rewards of its own row that weigh as much as those of all its source."""
_MAX_SIBLINGS = 7
"""Siblings of a sample in a group of eight, the most common size."""


@dataclass(slots=True)
class _Moments:
    """Exponentially forgetting count, mean and centred second moment (Welford's recurrence): of equal rewards the mean
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
    """Rewards by source and by row, as the ledger saw them come in."""

    sources: dict[str, _Moments] = field(default_factory=dict)
    rows: dict[str, _Moments] = field(default_factory=dict)

    def add(self, prompt: Prompt, reward: float) -> None:
        """Rewards that no trainer can hold are left out: journals of earlier versions may have some."""
        if abs(reward) <= MAX_REWARD:
            self.sources.setdefault(prompt.source, _Moments()).add(reward, _MEMORY)
            self.rows.setdefault(_row(prompt), _Moments()).add(reward, 16 * _PRIOR)

    def baseline(self, prompt: Prompt) -> Baseline:
        """Return the baseline for a sample of ``prompt`` that begins now."""
        source, row = self.sources.get(prompt.source, _Moments()), self.rows.get(_row(prompt), _Moments())
        mean = source.mean + row.weight / (_PRIOR + row.weight) * (row.mean - source.mean)
        return Baseline(mean=mean, std=math.sqrt(source.variance), num_siblings=min(source.weight, _MAX_SIBLINGS))


def _row(prompt: Prompt) -> str:
    """The row of the dataset, whatever the pass over it."""
    return prompt.prompt_id.rpartition("@")[0]
