"""The timeline of every sample, read from the journal's events.

``Timeline.of`` is one pass over the events that count (``rollover.rollout.journal.effective``). It keeps
counts and times, never token ids, so the timeline of a long run stays small. The token account closes:
``decoded = trained + wasted (by cause) + live``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from rollover.rollout.events import (
    BatchConsumed,
    BatchSkipped,
    BatchTrained,
    CheckpointSaved,
    Event,
    GroupDropped,
    GroupOpened,
    Restarted,
    SampleFailed,
    SampleScored,
    SampleStarted,
    SegmentEnded,
    VersionPublished,
)
from rollover.types import FinishReason, SampleId, Segment, WasteCause


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedSpan:
    """A stretch in which one sample was decoded under one policy version.

    Example: ``start_s=1.0, end_s=3.5, policy_version=0, num_tokens=12``.
    """

    start_s: float
    end_s: float
    policy_version: int
    num_tokens: int
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Time a sample with tokens spent stopped: parked, or after a crash waiting for the restart."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTrace:
    """One sample from its first token to its end."""

    sample_id: SampleId
    prompt: str
    spans: tuple[DecodedSpan, ...]
    gaps: tuple[Gap, ...]
    reward: float | None
    trained_step: int | None
    """Step whose batch holds it; ``None`` while there is none or when it was wasted."""
    waste: WasteCause | None
    finished: bool
    """It ended by itself (stop or length)."""

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.spans)

    @property
    def num_resumes(self) -> int:
        return sum(s.finish_reason is FinishReason.ABORT for s in self.spans[:-1])

    @property
    def oldest_version(self) -> int | None:
        return min((s.policy_version for s in self.spans if s.num_tokens), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumedStep:
    """The batch of one training step, and how old it was when it was consumed."""

    step: int
    consumed_s: float
    num_groups: int
    num_samples: int
    num_resumes: int
    lags: Mapping[int, int]
    """Lag (step minus the version that sampled the token) to number of tokens."""
    head_lags: tuple[int, ...]
    """Lag of each sample's oldest token."""
    untrained: Mapping[WasteCause, int] = field(default_factory=dict)
    """Its tokens without a gradient, by cause, once the step is done."""

    @property
    def num_tokens(self) -> int:
        return sum(self.lags.values())

    @property
    def num_trained_tokens(self) -> int:
        """Those that had a gradient."""
        return self.num_tokens - sum(self.untrained.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class WastePoint:
    """Tokens written off at one moment."""

    time_s: float
    cause: WasteCause
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The whole run. Tuples are in order of time; samples in order of their ids."""

    samples: tuple[SampleTrace, ...]
    """Samples that decoded something."""
    steps: tuple[ConsumedStep, ...]
    publishes: tuple[VersionPublished, ...]
    restarts_s: tuple[float, ...]
    active: tuple[tuple[float, int], ...]
    """(time_s, samples at the engine from then on)."""
    reward_waits: tuple[tuple[float, float], ...]
    """From when to when nothing decoded and a reward was being computed."""
    waste: tuple[WastePoint, ...]
    lost_tokens: int
    """Tokens that only voided events recorded; part of the waste."""
    num_reprefilled_tokens: int
    start_s: float
    end_s: float

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        fold = _Fold()
        for event in events:
            fold.apply(event)
        samples = tuple(s.trace(fold.now_s) for _, s in sorted(fold.samples.items()) if s.spans)
        return cls(
            samples=samples,
            steps=tuple(step for _, step in sorted(fold.steps.items())),
            publishes=tuple(fold.publishes),
            restarts_s=tuple(fold.restarts_s),
            active=tuple(fold.active),
            reward_waits=tuple(fold.reward_waits),
            waste=tuple(fold.all_waste()),
            lost_tokens=fold.lost_tokens,
            num_reprefilled_tokens=fold.reprefilled_tokens,
            start_s=fold.start_s if fold.start_s is not None else 0.0,
            end_s=fold.now_s,
        )

    @property
    def decoded_tokens(self) -> int:
        return sum(s.num_tokens for s in self.samples) + self.lost_tokens

    @property
    def trained_tokens(self) -> int:
        return sum(s.num_trained_tokens for s in self.steps)

    @property
    def wasted_tokens(self) -> dict[WasteCause, int]:
        totals: Counter[WasteCause] = Counter()
        for point in self.waste:
            totals[point.cause] += point.num_tokens
        return {cause: n for cause, n in totals.items() if n}

    @property
    def live_tokens(self) -> int:
        return self.decoded_tokens - self.trained_tokens - sum(self.wasted_tokens.values())


@dataclass(slots=True)
class _Sample:
    """A sample while the events pass by."""

    sample_id: SampleId
    prompt: str
    spans: list[DecodedSpan] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    stopped_s: float | None = None
    """Since when it has been parked."""
    reward: float | None = None
    failed: bool = False
    trained_step: int | None = None
    waste: WasteCause | None = None
    finished: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.spans)

    def add(self, segment: Segment, now_s: float) -> None:
        self.spans.append(
            DecodedSpan(
                start_s=segment.start_s,
                end_s=segment.end_s,
                policy_version=segment.policy_version,
                num_tokens=len(segment.token_ids),
                finish_reason=segment.finish_reason,
            )
        )
        if segment.finish_reason is FinishReason.ABORT and self.num_tokens:
            self.stopped_s = now_s
        self.finished = segment.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)

    def go_on(self, now_s: float) -> None:
        """The gap ends: the sample was resumed, or nobody waits for it any longer."""
        if self.stopped_s is not None and now_s > self.stopped_s:
            self.gaps.append(Gap(start_s=self.stopped_s, end_s=now_s))
        self.stopped_s = None

    def trace(self, end_s: float) -> SampleTrace:
        self.go_on(end_s)
        return SampleTrace(
            sample_id=self.sample_id,
            prompt=self.prompt,
            spans=tuple(self.spans),
            gaps=tuple(self.gaps),
            reward=self.reward,
            trained_step=self.trained_step,
            waste=self.waste,
            finished=self.finished,
        )


class _Fold:
    """The state between two events."""

    def __init__(self) -> None:
        self.samples: dict[SampleId, _Sample] = {}
        self.groups: dict[int, tuple[_Sample, ...]] = {}
        self.steps: dict[int, ConsumedStep] = {}
        self.running: set[SampleId] = set()
        self.active: list[tuple[float, int]] = []
        self.unscored: set[SampleId] = set()
        self.reward_waits: list[tuple[float, float]] = []
        self.waiting_s: float | None = None
        """Since when nothing decodes and a reward is waited for."""
        self.waste: list[WastePoint] = []
        self.waste_of_steps: dict[int, list[WastePoint]] = {}
        """Tokens without a gradient: a restart takes them back with the step."""
        self.publishes: list[VersionPublished] = []
        self.restarts_s: list[float] = []
        self.lost_tokens = 0
        self.reprefilled_tokens = 0
        self.start_s: float | None = None
        self.now_s = 0.0

    def apply(self, event: Event) -> None:
        self.start_s = event.time_s if self.start_s is None else self.start_s
        self.now_s = max(self.now_s, event.time_s)
        match event:
            case GroupOpened(group_id=group_id, prompt=prompt, group_size=size):
                ids = [SampleId(group_id, i) for i in range(size)]
                self.groups[group_id] = tuple(_Sample(sample_id=i, prompt=prompt.text) for i in ids)
                self.samples.update(zip(ids, self.groups[group_id], strict=True))
            case SampleStarted(sample_id=sample_id):
                self.samples[sample_id].go_on(event.time_s)
                self._run(sample_id, event.time_s)
            case SegmentEnded(sample_id=sample_id, segment=segment):
                self.samples[sample_id].add(segment, event.time_s)
                self.reprefilled_tokens += segment.num_prefilled_tokens
                if segment.finish_reason is not None:
                    self._leave([sample_id], event.time_s)
                if segment.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    self.unscored.add(sample_id)
            case SampleScored(sample_id=sample_id, reward=reward):
                self.samples[sample_id].reward = reward
                self.unscored.discard(sample_id)
            case SampleFailed(sample_id=sample_id):
                self.samples[sample_id].failed = True
                self._write_off([self.samples[sample_id]], event.time_s, WasteCause.FAILED)
            case GroupDropped(group_id=group_id, cause=cause):
                kept = [s for s in self.groups[group_id] if not s.failed]
                self._write_off(kept, event.time_s, cause)
            case BatchConsumed():
                self._consume(event)
            case BatchTrained(step=step, untrained=untrained):
                self.steps[step] = replace(self.steps[step], untrained=untrained)
                self.waste_of_steps[step] = [
                    WastePoint(time_s=event.time_s, cause=cause, num_tokens=n) for cause, n in untrained.items()
                ]
            case VersionPublished():
                self.publishes.append(event)
            case Restarted():
                self._restart(event)
            case CheckpointSaved() | BatchSkipped():
                pass
        self._watch_rewards(event.time_s)

    def _watch_rewards(self, now_s: float) -> None:
        waiting = bool(self.unscored) and not self.running
        if waiting and self.waiting_s is None:
            self.waiting_s = now_s
        elif not waiting and self.waiting_s is not None:
            self.reward_waits.append((self.waiting_s, now_s))
            self.waiting_s = None

    def all_waste(self) -> list[WastePoint]:
        of_steps = [point for points in self.waste_of_steps.values() for point in points]
        return sorted([*self.waste, *of_steps], key=lambda point: point.time_s)

    def _run(self, sample_id: SampleId, now_s: float) -> None:
        self.running.add(sample_id)
        self._count(now_s)

    def _leave(self, sample_ids: Iterable[SampleId], now_s: float) -> None:
        before = len(self.running)
        self.running.difference_update(sample_ids)
        if len(self.running) != before:
            self._count(now_s)

    def _count(self, now_s: float) -> None:
        """Record the number of running samples; of several changes at one moment the last one counts."""
        if self.active and self.active[-1][0] == now_s:
            self.active.pop()
        self.active.append((now_s, len(self.running)))

    def _write_off(self, samples: Iterable[_Sample], now_s: float, cause: WasteCause) -> None:
        samples = list(samples)
        for sample in samples:
            sample.go_on(now_s)
            sample.waste = cause
        self.waste.append(WastePoint(time_s=now_s, cause=cause, num_tokens=sum(s.num_tokens for s in samples)))
        self._leave([s.sample_id for s in samples], now_s)
        self.unscored.difference_update(s.sample_id for s in samples)

    def _consume(self, event: BatchConsumed) -> None:
        samples = [s for g in event.group_ids for s in self.groups[g] if not s.failed]
        lags: Counter[int] = Counter()
        heads = []
        for sample in samples:
            sample.trained_step = event.step
            for span in sample.spans:
                if span.num_tokens:
                    lags[event.step - span.policy_version] += span.num_tokens
            if sample.num_tokens:
                heads.append(event.step - min(s.policy_version for s in sample.spans if s.num_tokens))
        self.steps[event.step] = ConsumedStep(
            step=event.step,
            consumed_s=event.time_s,
            num_groups=len(event.group_ids),
            num_samples=len(samples),
            num_resumes=sum(p.finish_reason is FinishReason.ABORT for sample in samples for p in sample.spans[:-1]),
            lags=dict(sorted(lags.items())),
            head_lags=tuple(heads),
        )

    def _restart(self, event: Restarted) -> None:
        """Running samples fall back to what the journal has; batches from ``step`` on are not trained yet."""
        for sample_id in self.running:
            sample = self.samples[sample_id]
            sample.stopped_s = sample.spans[-1].end_s if sample.num_tokens else None
        self._leave(tuple(self.running), event.time_s)
        for step in [s for s in self.steps if s >= event.step]:
            del self.steps[step]
            self.waste_of_steps.pop(step, None)
        for sample in self.samples.values():
            if sample.trained_step is not None and sample.trained_step >= event.step:
                sample.trained_step = None
        self.restarts_s.append(event.time_s)
        self.lost_tokens += event.lost_tokens
        if event.lost_tokens:
            self.waste.append(WastePoint(time_s=event.time_s, cause=WasteCause.FAILED, num_tokens=event.lost_tokens))
