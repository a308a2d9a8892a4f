"""Distributions and curves computed from a timeline, by pure functions."""

from __future__ import annotations

import heapq
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ldexp
from statistics import fmean

from rollover.batch import WasteCause
from rollover.report.timeline import ConsumedStep, SampleTrace, Timeline, WastePoint
from rollover.rollout.events import SampleFailed
from rollover.rollout.lag import LagSummary, weighted_quantile

MOST_KINDS = 10
"""Kinds of failed samples that are shown, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSummary:
    """Response lengths of a set of samples, in tokens."""

    mean: float
    median: int
    p95: int
    max: int


def lag_histogram(steps: Iterable[ConsumedStep]) -> dict[int, int]:
    """Count the trained tokens of each lag, over all steps, ascending."""
    lags: Counter[int] = Counter()
    for step in steps:
        lags.update(step.lag.tokens)
    return dict(sorted(lags.items()))


def lag(steps: Sequence[ConsumedStep]) -> LagSummary | None:
    """Summarise the lags of the trained tokens; return ``None`` until a token has been trained."""
    found = [step.lag for step in steps]
    return LagSummary.of(found) if any(map(any, found)) else None


def generated_lengths(samples: Iterable[SampleTrace]) -> tuple[int, ...]:
    """Return the lengths of all samples that decoded and go on no more; those that were given up before their end count
    with what they had."""
    return tuple(s.num_tokens for s in samples if s.num_tokens and (s.finished or s.waste is not None))


def trained_lengths(samples: Iterable[SampleTrace]) -> tuple[int, ...]:
    return tuple(s.num_tokens for s in samples if s.trained_step is not None and s.num_tokens)


def lengths(values: Sequence[int]) -> LengthSummary | None:
    """Summarise response lengths; return ``None`` for no samples."""
    if not values:
        return None
    counts = Counter(values)
    return LengthSummary(
        mean=sum(values) / len(values),
        median=weighted_quantile(counts, 0.5),
        p95=weighted_quantile(counts, 0.95),
        max=max(values),
    )


def mean_reward(rewards: Sequence[float]) -> float:
    """Return the mean of rewards whose sum may overflow: journals of earlier versions hold any finite ones."""
    return ldexp(fmean(ldexp(reward, -64) for reward in rewards), 64)


def lengths_by_reward(samples: Iterable[SampleTrace]) -> list[tuple[float, tuple[float, float]]]:
    """Return (step, (mean length of the responses above the mean reward of the step's batch, and of those below)), for
    the steps that have both.
    """
    by_step: dict[int, list[SampleTrace]] = {}
    for sample in samples:
        if sample.trained_step is not None and sample.reward is not None:
            by_step.setdefault(sample.trained_step, []).append(sample)
    found = []
    for step, batch in sorted(by_step.items()):
        mean = mean_reward([s.reward or 0.0 for s in batch])
        above = [s.num_tokens for s in batch if (s.reward or 0.0) > mean]
        below = [s.num_tokens for s in batch if (s.reward or 0.0) < mean]
        if above and below:
            found.append((float(step), (fmean(above), fmean(below))))
    return found


def failure_kind(reason: str) -> str:
    """Return what failures of a kind have in common: the beginning of their reason without words that have digits, such
    as ids.
    """
    return re.sub(r"[^\s(:]*\d[^\s:]*", "#", reason)[:120]


def failure_kinds(failures: Iterable[SampleFailed]) -> tuple[tuple[int, SampleFailed], ...]:
    """Return (number of failures, the first of them) of each kind, the most frequent first."""
    kinds: dict[str, list[SampleFailed]] = {}
    for failure in failures:
        kinds.setdefault(failure_kind(failure.reason), []).append(failure)
    return tuple(sorted(((len(alike), alike[0]) for alike in kinds.values()), key=lambda kind: -kind[0]))


def waste_curves(points: Sequence[WastePoint]) -> dict[WasteCause, tuple[tuple[float, int], ...]]:
    """Return the cumulative wasted tokens by cause: (time_s, tokens so far). Causes without tokens are left out."""
    curves: dict[WasteCause, list[tuple[float, int]]] = {}
    for point in points:
        if point.num_tokens:
            curve = curves.setdefault(point.cause, [])
            curve.append((point.time_s, (curve[-1][1] if curve else 0) + point.num_tokens))
    return {cause: tuple(curve) for cause, curve in curves.items()}


def clip_curve(curve: Sequence[tuple[float, int]], start_s: float, end_s: float) -> tuple[tuple[float, int], ...]:
    """Return the step curve inside an interval: from ``start_s`` to ``end_s``, with the values in force there."""
    first = bisect_right(curve, start_s, key=lambda point: point[0])
    level = curve[first - 1][1] if first else 0
    inside = ((start_s, level), *(p for p in curve[first:] if p[0] < end_s))
    return (*inside, (end_s, inside[-1][1]))


def evenly(curve: Sequence[tuple[float, int]], num: int) -> tuple[tuple[float, int], ...]:
    """Return the values of a step curve at ``num`` times that are equally far apart, from its first to its last."""
    start_s, end_s = curve[0][0], curve[-1][0]
    times = [start_s + (end_s - start_s) * i / (num - 1) for i in range(num)]
    return tuple((t, curve[bisect_right(curve, t, key=lambda point: point[0]) - 1][1]) for t in times)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWindow:
    """A stretch of consecutive training steps and the time it took."""

    first_step: int
    last_step: int
    start_s: float
    end_s: float
    num_resumes: int
    """Number of parked samples that were resumed inside it."""


def windows(timeline: Timeline, *, num_steps: int, max_windows: int) -> tuple[StepWindow, ...]:
    """Cut the run into stretches of ``num_steps`` steps; of many, return ``max_windows`` spread evenly. The first and
    the last stretch are always there. A run without a batch is one window with steps -1."""
    steps = timeline.steps
    if not steps:
        if not timeline.samples:
            return ()
        return (_window(timeline, -1, -1, timeline.start_s, timeline.end_s),)
    cuts = list(range(0, len(steps), num_steps))
    if len(cuts) > max_windows:
        picks = max(1, max_windows - 1)
        cuts = [cuts[round(i * (len(cuts) - 1) / picks)] for i in range(max_windows)]
    ends = [min(cut + num_steps, len(steps)) - 1 for cut in cuts]
    return tuple(window_of(timeline, steps[a].step, steps[b].step) for a, b in zip(cuts, ends, strict=True))


def window_of(timeline: Timeline, first_step: int, last_step: int) -> StepWindow:
    """Return the window from the end of the rollout before ``first_step`` to the end of ``last_step``; both must
    exist."""
    consumed = {s.step: s.consumed_s for s in timeline.steps}
    start_s = max((t for s, t in consumed.items() if s < first_step), default=timeline.start_s)
    is_last = last_step == timeline.steps[-1].step
    end_s = _last_activity_s(timeline) if is_last else consumed[last_step]
    return _window(timeline, first_step, last_step, start_s, end_s)


def _last_activity_s(timeline: Timeline) -> float:
    """Return when the last token was decoded or the last weights published: later events only close the books."""
    spans = (p.end_s for s in timeline.samples for p in s.spans)
    return max((*spans, *(p.time_s for p in timeline.publishes), *(s.consumed_s for s in timeline.steps)))


def _window(timeline: Timeline, first: int, last: int, start_s: float, end_s: float) -> StepWindow:
    resumed_s = (g.end_s for s in timeline.samples for g in s.gaps if g.end_s < s.spans[-1].end_s)
    num_resumes = sum(start_s < t < end_s for t in resumed_s)
    return StepWindow(first_step=first, last_step=last, start_s=start_s, end_s=end_s, num_resumes=num_resumes)


def visible(samples: Iterable[SampleTrace], window: StepWindow) -> tuple[SampleTrace, ...]:
    """Return the samples that were decoding or parked at some moment of the window."""
    return tuple(s for s in samples if _bounds(s, window) is not None)


def lanes(samples: Iterable[SampleTrace], window: StepWindow) -> dict[int, list[SampleTrace]]:
    """Pack samples into few rows without overlap: row number to its samples, in time order. A sample keeps its row from
    its first token to its end, parked time included."""
    bounded = [(bounds, sample) for sample in samples if (bounds := _bounds(sample, window)) is not None]
    bounded.sort(key=lambda entry: (entry[0][0], entry[1].sample_id))
    rows: dict[int, list[SampleTrace]] = {}
    for row, (_, sample) in zip(packed([bounds for bounds, _ in bounded]), bounded, strict=True):
        rows.setdefault(row, []).append(sample)
    return rows


def packed(intervals: Iterable[tuple[float, float]]) -> list[int]:
    """Return the row of each interval (start, end), given in order of their start, so that none overlap in a row."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    rows: list[int] = []
    for start_s, end_s in intervals:
        while busy and busy[0][0] <= start_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        rows.append(row)
        heapq.heappush(busy, (end_s, row))
    return rows


def _bounds(sample: SampleTrace, window: StepWindow) -> tuple[float, float] | None:
    """Return from when to when the sample is inside the window; ``None`` when it never is."""
    parts = [(p.start_s, p.end_s) for p in sample.spans] + [(g.start_s, g.end_s) for g in sample.gaps]
    inside = [(a, b) for a, b in parts if b > window.start_s and a < window.end_s]
    if not inside:
        return None
    return (max(window.start_s, min(a for a, _ in inside)), min(window.end_s, max(b for _, b in inside)))
