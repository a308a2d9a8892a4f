"""Statistics of a run: a second fold of its events, beside the ledger's.

The ledger records where every group, sample and token is. The statistics summarise the run so far: how long recent
responses were, how old the tokens of recent batches were, and which rewards a prompt was expected to get. They follow
from the same events, so a replay of the journal restores them bit for bit.

A batch is measured once, when it is first consumed. A batch that is handed out again after a restart adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from rollover.batch import Baseline
from rollover.rollout.events import BatchConsumed, CheckpointSaved, Event, GroupDropped, GroupOpened, SampleScored
from rollover.rollout.ledger import Ledger
from rollover.rollout.records import SCORED
from rollover.rollout.reward_history import RewardHistory

_NUM_LENGTHS = 8192
"""Number of responses that are remembered: several rounds of them, since the last batches of a round have its
shortest."""
_LAG_KEPT = 1 - 1 / 64
"""Share of their weight that earlier batches keep when another one is added."""


@dataclass(frozen=True, slots=True, eq=False)
class RecentLengths:
    """Lengths of the responses in the last trained groups, oldest group first.

    Two values are equal only when they are the same object, so that results computed from one can be cached.

    Example: after batches of the groups (120, 80) and (512, 30), ``groups`` is ``((120, 80), (512, 30))``.
    """

    groups: tuple[tuple[int, ...], ...] = ()

    def followed_by(self, groups: Sequence[tuple[int, ...]]) -> Self:
        """Return the lengths with ``groups`` added and the oldest ones forgotten."""
        size = max(map(len, groups), default=1)
        return type(self)((*self.groups, *groups)[-_NUM_LENGTHS // max(1, size) :])


@dataclass(frozen=True, slots=True)
class RecentLag:
    """Mean over batches of the mean lag of their tokens, in versions, with the weight of a batch fading by 1/64 per
    later batch.

    Example: a first batch with a mean lag of 0.4 gives ``mean`` 0.4 and ``num_batches`` 1. A second one without lag
    gives a mean of 0.39375 / 1.984375 = 0.198.
    """

    num_batches: float = 0.0
    """Sum of the batches' weights."""
    sum_of_lags: float = 0.0
    """Weighted sum of their mean lags."""

    def followed_by(self, lag: float) -> Self:
        """Return the lag with a batch of this mean lag added."""
        return type(self)(self.num_batches * _LAG_KEPT + 1, self.sum_of_lags * _LAG_KEPT + lag)

    @property
    def mean(self) -> float:
        return self.sum_of_lags / self.num_batches if self.num_batches else 0.0


class Statistics:
    """Lengths, lag and reward baselines of a run; only ``apply`` changes them.

    Example: two single samples of one prompt were scored with 1.0 and 0.0. A third sample, opened then, gets a
    baseline with a mean of 0.498, a standard deviation of 0.5 and the worth of 1.996 siblings, which no longer changes.
    """

    def __init__(self) -> None:
        self.lengths = RecentLengths()
        self.lag = RecentLag()
        self.baselines: dict[int, Baseline] = {}
        """Baselines of the groups of one sample that are not yet checkpointed, by group id. A baseline is fixed when
        its group is opened."""
        self._rewards = RewardHistory()
        self._num_batches = 0
        """Number of batches measured, which is also the step of the next one to be measured."""

    def apply(self, event: Event, ledger: Ledger) -> None:
        """Process ``event``, which ``ledger`` has already applied."""
        match event:
            case GroupOpened(group_id=group_id, prompt=prompt, group_size=1):
                self.baselines[group_id] = self._rewards.baseline(prompt)
            case SampleScored(sample_id=sample_id, reward=reward, shaping=shaping):
                if sample_id.group in self.baselines:
                    self._rewards.add(ledger.groups[sample_id.group].prompt, reward + shaping)
            case GroupDropped(group_id=group_id):
                self.baselines.pop(group_id, None)
            case BatchConsumed(step=step, group_ids=group_ids):
                if step == self._num_batches:
                    self._measure(step, group_ids, ledger)
            case CheckpointSaved():
                self.baselines = {i: baseline for i, baseline in self.baselines.items() if i in ledger.groups}

    def _measure(self, step: int, group_ids: tuple[int, ...], ledger: Ledger) -> None:
        lengths: list[tuple[int, ...]] = []
        num_tokens = sum_of_lags = 0
        for group_id in group_ids:
            scored = [s for s in ledger.groups[group_id].samples if s.state is SCORED]
            lengths.append(tuple(s.num_tokens for s in scored))
            for sample in scored:
                num_tokens += sample.num_tokens
                sum_of_lags += sum((step - s.policy_version) * len(s.token_ids) for s in sample.segments)
        self.lengths = self.lengths.followed_by(lengths)
        self.lag = self.lag.followed_by(sum_of_lags / max(1, num_tokens))
        self._num_batches += 1
