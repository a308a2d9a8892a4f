"""The lag of trained tokens: of each token, the step that trains it minus the version that sampled it."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, Self

from rollover.batch import Batch

LagOf = Literal["batch", "token", "group", "head", "max"]
"""Over what a mean lag is taken, as in ``LagSummary``."""


class BatchLag(tuple[Mapping[int, int], ...]):
    """Numbers of tokens by their lag, for each group of a batch."""

    __slots__ = ()

    @classmethod
    def of(cls, batch: Batch) -> Self:
        return cls.counted(
            batch.step,
            (
                ((s.policy_version, len(s.token_ids)) for t in group.trajectories for s in t.segments)
                for group in batch.groups
            ),
        )

    @classmethod
    def counted(cls, step: int, groups: Iterable[Iterable[tuple[int, int]]]) -> Self:
        """Count the tokens of a batch that ``step`` trains.

        Args:
            groups: for each group, versions and the numbers of tokens that they sampled.
        """
        found = []
        for group in groups:
            lags: Counter[int] = Counter()
            for version, num_tokens in group:
                if num_tokens:
                    lags[step - version] += num_tokens
            found.append(lags)
        return cls(found)

    @property
    def tokens(self) -> Counter[int]:
        """Return the number of tokens of each lag."""
        lags: Counter[int] = Counter()
        for group in self:
            lags.update(group)
        return lags

    @property
    def mean(self) -> float:
        """Return the mean over tokens; 0 without any."""
        return mean_of(self.tokens)

    @property
    def groups(self) -> list[float]:
        """Return the mean lag of each group's tokens."""
        return [mean_of(group) for group in self if group]

    @property
    def heads(self) -> list[int]:
        """Return the lag of each group's oldest token."""
        return [max(group) for group in self if group]


@dataclass(frozen=True, slots=True, kw_only=True)
class LagSummary:
    """Lag of trained tokens, in versions."""

    token: float
    """Mean over tokens."""
    batch: float
    """Mean over batches of the mean of their tokens: the lag of an optimizer step, each of which trains one batch."""
    group: float
    """Mean over groups of the mean of their tokens."""
    head: float
    """Mean over groups of the lag of their oldest token."""
    max: int
    p95: int
    """The lag that 95 % of the tokens do not exceed."""
    off_policy_fraction: float
    """Share of the tokens with a lag of 1 or more."""

    @classmethod
    def of(cls, batches: Sequence[BatchLag]) -> Self:
        """Summarise the lags of batches. Without tokens, everything is 0."""
        lags: Counter[int] = Counter()
        for batch in batches:
            lags.update(batch.tokens)
        tokens = lags or {0: 1}
        return cls(
            token=mean_of(tokens),
            batch=statistics.fmean([b.mean for b in batches if any(b)] or [0]),
            group=statistics.fmean([lag for b in batches for lag in b.groups] or [0]),
            head=statistics.fmean([lag for b in batches for lag in b.heads] or [0]),
            max=max(tokens),
            p95=weighted_quantile(tokens, 0.95),
            off_policy_fraction=sum(n for lag, n in tokens.items() if lag > 0) / sum(tokens.values()),
        )


def mean_of(lags: Mapping[int, int]) -> float:
    """Return the mean over tokens; 0 without any."""
    return sum(lag * n for lag, n in lags.items()) / max(1, sum(lags.values()))


def weighted_quantile(counts: Mapping[int, int], q: float) -> int:
    """Return the smallest value such that at least the share ``q`` of the counts lies at or below it."""
    values = sorted(counts)
    reached = list(accumulate(counts[value] for value in values))
    return values[bisect_left(reached, q * reached[-1])]
