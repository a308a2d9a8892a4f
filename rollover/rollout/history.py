"""What rewards were like before a sample began: a baseline that knows nothing of the sample.

A policy gradient stays unbiased under any baseline that does not depend on the response it is subtracted from:
E[b grad log pi(y)] = b E[grad log pi(y)] = 0. The mean of the siblings that happen to be scored when a sample is
consumed does depend on it: the longer the response, the more and the longer of its siblings are among them. What was
known when the sample was opened does not, whatever finishes when. Rewards of earlier passes over the same row count
for what they tell, the others of its source for the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rollover.types import Baseline, Prompt

_MEMORY = 256
"""Rewards after which one counts e times less: the policy moves on."""
_PRIOR = 4.0
"""Rewards of its own row that weigh as much as those of all its source."""


@dataclass(slots=True)
class _Moments:
    """Exponentially forgetting count, sum and sum of squares."""

    weight: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add(self, reward: float, memory: float) -> None:
        keep = math.exp(-1 / memory)
        self.weight = keep * self.weight + 1
        self.total = keep * self.total + reward
        self.squares = keep * self.squares + reward * reward

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else 0.0

    @property
    def variance(self) -> float:
        return max(0.0, self.squares / self.weight - self.mean**2) if self.weight else 0.0


@dataclass(slots=True)
class RewardHistory:
    """Rewards by source and by row, as the ledger saw them come in."""

    sources: dict[str, _Moments] = field(default_factory=dict)
    rows: dict[str, _Moments] = field(default_factory=dict)

    def add(self, prompt: Prompt, reward: float) -> None:
        self.sources.setdefault(prompt.source, _Moments()).add(reward, _MEMORY)
        self.rows.setdefault(_row(prompt), _Moments()).add(reward, 16 * _PRIOR)

    def baseline(self, prompt: Prompt) -> Baseline:
        """For a sample of ``prompt`` that begins now."""
        source, row = self.sources.get(prompt.source, _Moments()), self.rows.get(_row(prompt), _Moments())
        mean = (_PRIOR * source.mean + row.total) / (_PRIOR + row.weight)
        return Baseline(mean=mean, std=math.sqrt(source.variance))


def _row(prompt: Prompt) -> str:
    """The row of the dataset, whatever the pass over it."""
    return prompt.prompt_id.rpartition("@")[0]
