"""The timeline of every sample, read from the journal's events.

``Timeline.of`` is one pass over the events that count. It keeps counts and times, never the tokens of responses, so the
timeline of a long run stays small. The token account closes: ``decoded = trained + wasted (by cause) + live``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from rollover.batch import WasteCause
from rollover.rollout.events import (
    BatchConsumed,
    BatchSkipped,
    BatchTrained,
    CheckpointSaved,
    Event,
    GroupDropped,
    GroupOpened,
    Observed,
    Restarted,
    SampleFailed,
    SampleScored,
    SampleStarted,
    SegmentEnded,
    VersionPublished,
)
from rollover.rollout.lag import BatchLag
from rollover.types import FinishReason, SampleId, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedSpan:
    """A stretch in which one sample was decoded under one policy version."""

    start_s: float
    end_s: float
    policy_version: int
    num_tokens: int
    finish_reason: FinishReason | None
    engine: str = ""
    """The member that decoded it, if the run has several engines."""

    def continues_into(self, later: DecodedSpan) -> bool:
        """Return whether only the saving of progress lies between the two."""
        return self.finish_reason is None and (self.policy_version, self.engine) == (later.policy_version, later.engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Time a sample with tokens spent stopped: parked, or after a crash waiting for the restart."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Acting:
    """Time in which the environment of an episode acted."""

    start_s: float
    end_s: float
    num_tokens: int
    end: FinishReason | None = None
    """Reason for which the episode ended with it, if it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTrace:
    """One sample from its first token to its end."""

    sample_id: SampleId
    prompt_id: str
    num_prompt_tokens: int
    """The opening's, if an environment writes the prompt."""
    spans: tuple[DecodedSpan, ...] = ()
    gaps: tuple[Gap, ...] = ()
    acting: tuple[Acting, ...] = ()
    reward: float | None = None
    trained_step: int | None = None
    """Step whose batch contains it; ``None`` while there is none or if it was wasted."""
    waste: WasteCause | None = None

    @property
    def answers(self) -> tuple[Acting, ...]:
        """Return what answered turns: all but an opening, before which nothing was decoded."""
        has_opening = [(s.num_tokens, s.finish_reason) for s in self.spans[:1]] == [(0, FinishReason.TURN)]
        return self.acting[int(has_opening) :]

    @property
    def finished(self) -> bool:
        """Return True if it ended by itself (stop or length), or its episode is over."""
        is_over = bool(self.acting) and self.acting[-1].end is not None
        last = self.spans[-1].finish_reason if self.spans else None
        return is_over or last in (FinishReason.STOP, FinishReason.LENGTH)

    @property
    def is_cut_short(self) -> bool:
        """Return whether it is an episode that reached a limit, perhaps with fewer tokens of its own than that has."""
        ends = {one.end for one in self.acting[-1:]} | {span.finish_reason for span in self.spans[-1:]}
        return bool(self.acting) and FinishReason.LENGTH in ends

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.spans)

    @property
    def num_resumes(self) -> int:
        return sum(s.finish_reason is FinishReason.ABORT for s in self.spans[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class WastePoint:
    """Tokens written off at one moment."""

    time_s: float
    cause: WasteCause
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumedStep:
    """The batch of one training step, and how old it was when it was consumed."""

    step: int
    consumed_s: float
    num_samples: int
    num_resumes: int
    lag: BatchLag
    """Tokens by their lag, group by group."""
    untrained: tuple[WastePoint, ...] = ()
    """Its tokens without a gradient, by cause, once the step is done."""

    @property
    def num_tokens(self) -> int:
        return sum(sum(group.values()) for group in self.lag)

    @property
    def num_trained_tokens(self) -> int:
        """Return the number of its tokens that had a gradient."""
        return self.num_tokens - sum(point.num_tokens for point in self.untrained)

    @property
    def is_skipped(self) -> bool:
        """Return True if its batch was skipped, as a user decided."""
        return any(point.cause is WasteCause.SKIPPED for point in self.untrained)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The whole run. Tuples are in order of time; samples in order of their ids."""

    samples: tuple[SampleTrace, ...]
    """Samples that decoded something."""
    steps: tuple[ConsumedStep, ...]
    publishes: tuple[VersionPublished, ...]
    restarts_s: tuple[float, ...]
    failures: tuple[SampleFailed, ...]
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
        for sample_id in tuple(fold.stopped_s):
            fold.go_on(sample_id, fold.now_s)
        fold.leave_out_skipped()
        return cls(
            samples=tuple(s for _, s in sorted(fold.samples.items()) if s.spans),
            steps=tuple(step for _, step in sorted(fold.steps.items())),
            publishes=tuple(fold.publishes),
            restarts_s=tuple(fold.restarts_s),
            failures=tuple(fold.failures),
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
    def trained_steps(self) -> tuple[ConsumedStep, ...]:
        """Return the steps whose batch was not skipped."""
        return tuple(s for s in self.steps if not s.is_skipped)

    @property
    def wasted_tokens(self) -> dict[WasteCause, int]:
        totals: Counter[WasteCause] = Counter()
        for point in self.waste:
            totals[point.cause] += point.num_tokens
        return {cause: n for cause, n in totals.items() if n}

    @property
    def live_tokens(self) -> int:
        return self.decoded_tokens - self.trained_tokens - sum(self.wasted_tokens.values())


class _Fold:
    """The state between two events."""

    def __init__(self) -> None:
        self.samples: dict[SampleId, SampleTrace] = {}
        self.groups: dict[int, tuple[SampleId, ...]] = {}
        self.stopped_s: dict[SampleId, float] = {}
        """Since when each parked sample with tokens has been parked."""
        self.steps: dict[int, ConsumedStep] = {}
        self.running: set[SampleId] = set()
        self.active: list[tuple[float, int]] = []
        self.unscored: set[SampleId] = set()
        self.reward_waits: list[tuple[float, float]] = []
        self.waiting_s: float | None = None
        """Since when nothing decodes and a reward is waited for."""
        self.waste: list[WastePoint] = []
        self.publishes: list[VersionPublished] = []
        self.restarts_s: list[float] = []
        self.failures: list[SampleFailed] = []
        self.lost_tokens = 0
        self.reprefilled_tokens = 0
        self.start_s: float | None = None
        self.now_s = 0.0

    def apply(self, event: Event) -> None:
        self.start_s = event.time_s if self.start_s is None else self.start_s
        self.now_s = max(self.now_s, event.time_s)
        match event:
            case GroupOpened(group_id=group_id, prompt=prompt, group_size=size):
                self.groups[group_id] = tuple(SampleId(group_id, i) for i in range(size))
                trace = partial(SampleTrace, prompt_id=prompt.prompt_id, num_prompt_tokens=len(prompt.token_ids))
                self.samples |= {i: trace(sample_id=i) for i in self.groups[group_id]}
            case SampleStarted(sample_id=sample_id):
                self.go_on(sample_id, event.time_s)
                self.running.add(sample_id)
                self._count(event.time_s)
            case SegmentEnded(sample_id=sample_id, segment=segment):
                self._decoded(sample_id, segment, event.time_s)
                self.reprefilled_tokens += segment.num_prefilled_tokens
                if segment.finish_reason is not None:
                    self._leave([sample_id], event.time_s)
                if segment.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    self.unscored.add(sample_id)
            case Observed(sample_id=sample_id):
                self._answered(event)
            case SampleScored(sample_id=sample_id, reward=reward):
                self._change(sample_id, reward=reward)
                self.unscored.discard(sample_id)
            case SampleFailed(sample_id=sample_id, cause=cause):
                self._write_off([sample_id], event.time_s, cause)
                self.failures += [event] if cause is WasteCause.FAILED else []
            case GroupDropped(group_id=group_id, cause=cause):
                self._write_off(self._kept(group_id), event.time_s, cause)
            case BatchConsumed():
                self._consume(event)
            case BatchTrained(step=step, untrained=untrained):
                points = (WastePoint(time_s=event.time_s, cause=c, num_tokens=n) for c, n in untrained.items())
                self.steps[step] = replace(self.steps[step], untrained=tuple(points))
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

    def leave_out_skipped(self) -> None:
        """Count the samples of skipped batches as wasted. While events follow, a restart may repeat these batches."""
        skipped = {step.step for step in self.steps.values() if step.is_skipped}
        for sample_id in [i for i, sample in self.samples.items() if sample.trained_step in skipped]:
            self._change(sample_id, trained_step=None, waste=WasteCause.SKIPPED)

    def all_waste(self) -> list[WastePoint]:
        of_steps = [point for step in self.steps.values() for point in step.untrained]
        return sorted([*self.waste, *of_steps], key=lambda point: point.time_s)

    def _change(self, sample_id: SampleId, **changes: Any) -> SampleTrace:
        self.samples[sample_id] = replace(self.samples[sample_id], **changes)
        return self.samples[sample_id]

    def _decoded(self, sample_id: SampleId, segment: Segment, now_s: float) -> None:
        span = DecodedSpan(
            start_s=segment.start_s,
            end_s=segment.end_s,
            policy_version=segment.policy_version,
            num_tokens=len(segment.token_ids),
            finish_reason=segment.finish_reason,
            engine=segment.engine,
        )
        spans = self.samples[sample_id].spans
        if spans and spans[-1].continues_into(span):
            span = replace(span, start_s=spans[-1].start_s, num_tokens=spans[-1].num_tokens + span.num_tokens)
            spans = spans[:-1]
        sample = self._change(sample_id, spans=(*spans, span))
        if segment.finish_reason is FinishReason.ABORT and sample.num_tokens:
            self.stopped_s[sample_id] = now_s

    def _answered(self, event: Observed) -> None:
        _, sample_id, answer = event
        acting = Acting(start_s=answer.start_s, end_s=answer.end_s, num_tokens=len(answer.token_ids), end=answer.end)
        sample = self._change(sample_id, acting=(*self.samples[sample_id].acting, acting))
        if not sample.num_prompt_tokens:
            self._change(sample_id, num_prompt_tokens=acting.num_tokens)
        if acting.end is not None:
            self.unscored.add(sample_id)
        else:
            self.stopped_s[sample_id] = event.time_s

    def go_on(self, sample_id: SampleId, now_s: float) -> None:
        """End the gap: the sample was resumed, or is no longer waited for."""
        stopped_s = self.stopped_s.pop(sample_id, now_s)
        if now_s > stopped_s:
            self._change(sample_id, gaps=(*self.samples[sample_id].gaps, Gap(start_s=stopped_s, end_s=now_s)))

    def _kept(self, group_id: int) -> list[SampleId]:
        """Return the samples of the group that did not fail."""
        return [i for i in self.groups[group_id] if self.samples[i].waste is None]

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

    def _write_off(self, sample_ids: Sequence[SampleId], now_s: float, cause: WasteCause) -> None:
        for sample_id in sample_ids:
            self.go_on(sample_id, now_s)
            self._change(sample_id, waste=cause)
        num_tokens = sum(self.samples[i].num_tokens for i in sample_ids)
        self.waste.append(WastePoint(time_s=now_s, cause=cause, num_tokens=num_tokens))
        self._leave(sample_ids, now_s)
        self.unscored.difference_update(sample_ids)

    def _consume(self, event: BatchConsumed) -> None:
        groups = [[self._change(i, trained_step=event.step) for i in self._kept(g)] for g in event.group_ids]
        samples = [sample for group in groups for sample in group]
        spans = (((span.policy_version, span.num_tokens) for s in group for span in s.spans) for group in groups)
        lag, num_resumes = BatchLag.counted(event.step, spans), sum(s.num_resumes for s in samples)
        self.steps[event.step] = ConsumedStep(
            step=event.step, consumed_s=event.time_s, num_samples=len(samples), num_resumes=num_resumes, lag=lag
        )

    def _restart(self, event: Restarted) -> None:
        """Take running samples back to what the journal has; batches from ``step`` on are not trained yet."""
        for sample_id in self.running:
            if (sample := self.samples[sample_id]).num_tokens:
                self.stopped_s[sample_id] = sample.spans[-1].end_s
        self._leave(tuple(self.running), event.time_s)
        for step in [s for s in self.steps if s >= event.step]:
            del self.steps[step]
        for sample_id, sample in self.samples.items():
            if sample.trained_step is not None and sample.trained_step >= event.step:
                self._change(sample_id, trained_step=None)
        self.restarts_s.append(event.time_s)
        self.lost_tokens += event.lost_tokens
        if event.lost_tokens:
            self.waste.append(WastePoint(time_s=event.time_s, cause=WasteCause.FAILED, num_tokens=event.lost_tokens))
