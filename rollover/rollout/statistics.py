"""Statistics of a run: a second fold of its events, beside the ledger's.

The ledger records where every group, sample and token is. The statistics summarise the run so far: how long recent
responses were, how old the tokens of recent batches were, how long iterations and training steps take, and which
rewards a prompt was expected to get. They follow from the same events, so a replay of the journal restores them bit for
bit.

A batch is measured once, when it is first consumed. A batch that is handed out again after a restart adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from rollover.batch import Baseline
from rollover.rollout.events import (
    BatchConsumed,
    CheckpointSaved,
    Event,
    GroupDropped,
    GroupOpened,
    Restarted,
    SampleScored,
    SampleStarted,
    SegmentEnded,
    VersionPublished,
)
from rollover.rollout.ledger import Ledger
from rollover.rollout.records import SCORED
from rollover.rollout.reward_history import RewardHistory

_NUM_LENGTHS = 8192
"""Number of responses that are remembered: several rounds of them, since the last batches of a round have its
shortest."""
_KEPT = 1 - 1 / 64
"""Share of their weight that earlier batches keep when another one is added."""
_LEAST_SPREAD = 1e-3
"""Variance of the running samples over their mean square below which nothing tells how they slow iterations down."""


@dataclass(frozen=True, slots=True, eq=False)
class RecentLengths:
    """Lengths of the responses in the last trained groups, oldest group first.

    Two values are equal only when they are the same object, so that results computed from one can be cached.
    """

    groups: tuple[tuple[int, ...], ...] = ()

    def followed_by(self, groups: Sequence[tuple[int, ...]]) -> Self:
        """Return the lengths with ``groups`` added and the oldest ones forgotten."""
        size = max(map(len, groups), default=1)
        return type(self)((*self.groups, *groups)[-_NUM_LENGTHS // max(1, size) :])


@dataclass(frozen=True, slots=True)
class RecentMean:
    """Mean of a figure over batches, with the weight of a batch fading by 1/64 per later batch."""

    num_batches: float = 0.0
    """Sum of the batches' weights."""
    total: float = 0.0
    """Weighted sum of their figures."""

    def followed_by(self, figure: float) -> Self:
        """Return the mean with a batch of this figure added."""
        return type(self)(self.num_batches * _KEPT + 1, self.total * _KEPT + figure)

    @property
    def mean(self) -> float:
        return self.total / self.num_batches if self.num_batches else 0.0


@dataclass(slots=True)
class IterationPace:
    """The time of a decode iteration: ``c0 (1 + B / B0)`` for B running samples, fitted to what was decoded between
    two versions and how long that took. Earlier versions fade as in ``RecentMean``.
    """

    c0_s: float = 0.0
    """Time of an iteration over few samples; 0 while nothing is known."""
    b0: float = math.inf
    """Number of samples at which an iteration takes twice as long, infinite if it takes no longer."""
    _now_s: float = 0.0
    _running: int = 0
    _num_tokens: int = 0
    """Number of tokens that have arrived since the last version."""
    _running_s: float = 0.0
    _squares_s: float = 0.0
    """Integrals of the running samples and of their square over time, since the last version."""
    _sums: tuple[float, ...] = (0.0,) * 5
    """Over tokens: of 1, running samples, times, and the products of running samples with themselves and with times."""

    def moved(self, time_s: float, running: int, num_tokens: int = 0) -> None:
        """Note that ``running`` samples run from now on, and that tokens have arrived."""
        if elapsed_s := time_s - self._now_s:
            self._now_s = time_s
            self._running_s += elapsed_s * self._running
            self._squares_s += elapsed_s * self._running * self._running
        self._num_tokens += num_tokens
        self._running = running

    def published(self) -> None:
        """Add what was decoded since the last version to the fit."""
        if self._num_tokens and self._running_s > 0:
            running, seconds = self._squares_s / self._running_s, self._running_s / self._num_tokens
            parts = (1.0, running, seconds, running * running, running * seconds)
            self._sums = tuple(s * _KEPT + self._num_tokens * p for s, p in zip(self._sums, parts, strict=True))
            self._fit()
        self._num_tokens, self._running_s, self._squares_s = 0, 0.0, 0.0

    def _fit(self) -> None:
        weight, running, seconds, squares, products = self._sums
        spread, slope = squares - running * running / weight, 0.0
        if spread > _LEAST_SPREAD * squares:
            slope = min(max(0.0, (products - running * seconds / weight) / spread), 0.99 * seconds / running)
        self.c0_s = (seconds - slope * running) / weight
        self.b0 = self.c0_s / slope if slope else math.inf


class Statistics:
    """Lengths, lag and reward baselines of a run; only ``apply`` changes them."""

    def __init__(self) -> None:
        self.lengths = RecentLengths()
        self.lag = RecentMean()
        """Mean lag of a batch's tokens, in versions."""
        self.training_s = RecentMean()
        """Time from when a batch is taken until weights that were trained on it are published."""
        self.pace = IterationPace()
        self.baselines: dict[int, Baseline] = {}
        """Baselines of the groups of one sample that are not yet checkpointed, by group id. A baseline is fixed when
        its group is opened."""
        self._rewards = RewardHistory()
        self._taken: tuple[int, float] | None = None
        """Step of the last batch that was measured, and when it was taken, unless it was handed out again."""
        self._num_batches = 0
        """Number of batches measured, which is also the step of the next one to be measured."""

    def apply(self, event: Event, ledger: Ledger) -> None:
        """Process ``event``, which ``ledger`` has already applied."""
        match event:  # the frequent ones first
            case SegmentEnded():
                self.pace.moved(event.time_s, len(ledger.running), len(event.segment.token_ids))
            case SampleStarted() | Restarted():
                self.pace.moved(event.time_s, len(ledger.running))
            case GroupOpened(group_id=group_id, prompt=prompt, group_size=1):
                self.baselines[group_id] = self._rewards.baseline(prompt)
            case SampleScored(sample_id=sample_id, reward=reward, shaping=shaping):
                if sample_id.group in self.baselines:
                    self._rewards.add(ledger.groups[sample_id.group].prompt, reward + shaping)
            case GroupDropped(group_id=group_id):
                self.baselines.pop(group_id, None)
            case BatchConsumed(time_s=time_s, step=step, group_ids=group_ids):
                if step == self._num_batches:
                    self._measure(step, group_ids, ledger)
                    self._taken = step, time_s
                elif self._taken is not None and step == self._taken[0]:
                    self._taken = None
            case VersionPublished(time_s=time_s, policy_version=version):
                self.pace.moved(time_s, len(ledger.running))
                self.pace.published()
                if self._taken is not None and version == self._taken[0] + 1:
                    self.training_s = self.training_s.followed_by(time_s - self._taken[1])
                    self._taken = None  # a resumed run publishes the version again
            case CheckpointSaved():
                self.baselines = {i: baseline for i, baseline in self.baselines.items() if i in ledger.groups}

    @property
    def training_iterations(self) -> float:
        """Return the number of decode iterations of few samples in the time of a training step."""
        return self.training_s.mean / self.pace.c0_s if self.pace.c0_s else 0.0

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
