"""The closing numbers of a run, and their table for the terminal.

Throughput never stands alone: lag, waste and re-prefilled tokens are beside it. Tokens, lag and waste come from the
journal, times and memory from the metrics; values that a run has not measured are ``None`` and appear as a dash.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rich.table import Table
from rich.text import Text

from rollover.batch import WasteCause
from rollover.report import measures, phases
from rollover.report.alarms import alarms
from rollover.report.measures import LengthSummary
from rollover.report.metrics import MetricRow, accuracies_by_dataset, series, standard_error_of
from rollover.report.record import RunRecord
from rollover.report.samples import algorithm_of
from rollover.report.throughput import DECODED, TRAINED
from rollover.report.timeline import Timeline
from rollover.rollout.events import SampleFailed
from rollover.rollout.lag import LagSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Held-out accuracy at one evaluation."""

    step: int
    value: float
    se: float | None
    """Standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run in numbers."""

    num_steps: int
    num_timed_steps: int
    """Steps whose time is known; that of a step which a kill interrupted is not."""
    loop_s: float | None
    """Wall time of the timed steps, idling included; no warm-up, and no evaluation that rollouts wait for."""
    accuracy_before: Accuracy | None
    accuracy_after: Accuracy | None
    """The last evaluation; ``None`` while there has been only one."""
    accuracy_by_dataset: Mapping[str, tuple[Accuracy | None, Accuracy | None]]
    reward_first: float | None
    reward_last: float | None
    """Mean reward of the first and of the last tenth of the steps."""
    decoded_tokens: int
    trained_tokens: int
    """Decoded tokens that had a gradient."""
    live_tokens: int
    """Decoded tokens that are neither trained nor wasted: parked or ready."""
    wasted_tokens: Mapping[WasteCause, int]
    """By cause."""
    reprefilled_tokens: int
    rollout_tokens_per_s: float | None
    trained_tokens_per_s: float | None
    """Both speeds as defined in ``throughput``."""
    lag: LagSummary | None
    """``None`` if the engine makes none."""
    resumes_per_sample: float | None
    """Mean over trained samples."""
    generated: LengthSummary | None
    trained: LengthSummary | None
    length_drift: float | None
    """Mean length trained over mean length generated, without responses that go on; 1 is no drift."""
    phase_s: Mapping[str, float]
    """Seconds by phase; they add up to the seconds of the steps."""
    peak_memory_bytes: int | None
    late_rewards: int
    """Checks against a known answer that were late and scored 0."""
    failures: tuple[tuple[int, SampleFailed], ...]
    """Kinds of failed samples: their number and the first of them."""
    alarms: tuple[str, ...]
    """Sentences of ``rollover.report.alarms``."""

    @property
    def wasted_by_rollout(self) -> Mapping[WasteCause, int]:
        """Return the tokens, by cause, that never reached the trainer."""
        return {cause: n for cause, n in self.wasted_tokens.items() if cause.is_by_rollout}

    @property
    def without_gradient(self) -> Mapping[WasteCause, int]:
        """Return the tokens, by cause, that were in a batch but contributed nothing to the loss."""
        return {cause: n for cause, n in self.wasted_tokens.items() if not cause.is_by_rollout}

    def fraction(self, tokens: Mapping[WasteCause, int]) -> float:
        """Return the part of the decoded tokens that ``tokens`` are."""
        return sum(tokens.values()) / self.decoded_tokens if self.decoded_tokens else 0.0


def summarize(
    rows: Sequence[MetricRow], timeline: Timeline, config: Mapping[str, Any] = MappingProxyType({})
) -> RunSummary:
    loop = _values(rows, "time/step_s")
    steps = [r.values for r in rows if r.kind == "step"]
    before, after = _first_and_last(rows, "accuracy")
    rewards = _values(rows, "reward/mean")
    tenth = max(1, len(rewards) // 10)
    trained = timeline.trained_steps
    samples = sum(s.num_samples for s in trained)
    generated = measures.lengths(measures.generated_lengths(timeline.samples))
    trained_lengths = measures.lengths(measures.trained_lengths(timeline.samples))
    memory = _values(rows, "memory/peak_bytes")
    wasted, decoded = timeline.wasted_tokens, timeline.decoded_tokens
    filtered = wasted.get(WasteCause.FILTER_ZERO_SIGNAL, 0) / decoded if decoded else 0.0
    return RunSummary(
        num_steps=len(steps) or len(timeline.steps),
        num_timed_steps=len(loop),
        loop_s=sum(loop) or None,
        accuracy_before=before,
        accuracy_after=after,
        accuracy_by_dataset={n.partition("/")[2]: _first_and_last(rows, n) for n in accuracies_by_dataset(rows)},
        reward_first=_mean(rewards[:tenth]),
        reward_last=_mean(rewards[-tenth:]),
        decoded_tokens=decoded,
        trained_tokens=timeline.trained_tokens,
        live_tokens=timeline.live_tokens,
        wasted_tokens=dict(sorted(wasted.items())),
        reprefilled_tokens=timeline.num_reprefilled_tokens,
        rollout_tokens_per_s=DECODED.over(steps),
        trained_tokens_per_s=TRAINED.over(steps),
        lag=measures.lag(trained),
        resumes_per_sample=sum(s.num_resumes for s in trained) / samples if samples else None,
        generated=generated,
        trained=trained_lengths,
        length_drift=trained_lengths.mean / generated.mean if generated and trained_lengths else None,
        phase_s=_phases(rows, timeline),
        peak_memory_bytes=int(max(memory)) if memory else None,
        late_rewards=int(sum(_values(rows, "reward/late")) + sum(n for _, _, n in series(rows, "eval", "eval/late"))),
        failures=measures.failure_kinds(timeline.failures),
        alarms=alarms(rows, algorithm_of(config), filtered=filtered),
    )


def _values(rows: Sequence[MetricRow], name: str) -> list[float]:
    return [v for _, _, v in series(rows, "step", name)]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _first_and_last(rows: Sequence[MetricRow], name: str) -> tuple[Accuracy | None, Accuracy | None]:
    found = [
        Accuracy(step=r.step, value=r.values[name], se=r.values.get(standard_error_of(name)))
        for r in rows
        if r.kind == "eval" and name in r.values
    ]
    return (found[0] if found else None, found[-1] if len(found) > 1 else None)


def _phases(rows: Sequence[MetricRow], timeline: Timeline) -> dict[str, float]:
    found = list(phases.by_step(rows, timeline).values())
    return {phase: sum(step[phase] for step in found) for phase in phases.PHASES} if found else {}


# -- for the terminal -----------------------------------------------------------------------------------


def summary_rows(s: RunSummary) -> tuple[tuple[str, str], ...]:
    """Return (what, value) as text, in reading order."""
    rows = [("accuracy before", accuracy_text(s.accuracy_before)), ("accuracy after", accuracy_text(s.accuracy_after))]
    if len(s.accuracy_by_dataset) > 1:
        for name, (first, last) in s.accuracy_by_dataset.items():
            rows.append((f"  {name}", f"{accuracy_text(first)} → {accuracy_text(last)}"))
    rows += [
        ("reward, first → last tenth", f"{number(s.reward_first, '.3f')} → {number(s.reward_last, '.3f')}"),
        ("rollout throughput", number(s.rollout_tokens_per_s, ",.0f", " decoded tokens/s")),
        ("training throughput", number(s.trained_tokens_per_s, ",.0f", " trained tokens/s of the whole loop")),
        ("lag", lag_text(s.lag)),
        ("off-policy tokens", number(s.lag.off_policy_fraction if s.lag else None, ".1%")),
        ("wasted by the rollout", waste_text(s, s.wasted_by_rollout)),
        ("without a gradient", waste_text(s, s.without_gradient)),
        ("re-prefilled tokens", f"{s.reprefilled_tokens:,}"),
        ("resumes per sample", number(s.resumes_per_sample, ".2f")),
        ("generated lengths", lengths_text(s.generated)),
        ("trained lengths", lengths_text(s.trained)),
        ("mean length, trained / generated", number(s.length_drift, ".2f")),
        ("time", phases_text(s)),
        ("peak memory", bytes_text(s.peak_memory_bytes)),
    ]
    if s.late_rewards:
        rows.append(("rewards that were late", f"{s.late_rewards:,} (scored 0)"))
    if s.failures:
        rows.append(("failed samples", f"{sum(n for n, _ in s.failures):,}"))
    for n, failure in s.failures[: measures.MOST_KINDS]:
        rows.append((f"  {n:,} like {failure.sample_id}", failure.reason[:300]))
    if others := s.failures[measures.MOST_KINDS :]:
        rows.append((f"  {sum(n for n, _ in others):,} more", f"for {len(others):,} other reasons"))
    return tuple(rows)


def summary_table(record: RunRecord, summary: RunSummary) -> Table:
    table = Table(
        title=Text(f"{record.name}: {took_text(summary)}"),
        show_header=False,
        title_justify="left",
        title_style="bold",
    )
    table.add_column(style="dim")
    table.add_column()
    for row in summary_rows(summary):
        table.add_row(*map(Text, row))
    for alarm in summary.alarms:
        table.add_row(Text("alarm", style="bold red"), Text(alarm))
    return table


def number(value: float | None, spec: str, unit: str = "") -> str:
    return "–" if value is None or math.isnan(value) else f"{value:{spec}}{unit}"


def accuracy_text(accuracy: Accuracy | None) -> str:
    if accuracy is None:
        return "–"
    se = "" if accuracy.se is None else f" ± {accuracy.se:.3f}"
    return f"{accuracy.value:.3f}{se} (step {accuracy.step})"


def lag_text(lag: LagSummary | None) -> str:
    if lag is None:
        return "–"
    return f"{lag.batch:.2f} versions, mean over batches; p95 {lag.p95}, max {lag.max}, head {lag.head:.2f}"


def lengths_text(found: LengthSummary | None) -> str:
    if found is None:
        return "–"
    return f"mean {found.mean:.1f}, median {found.median}, p95 {found.p95}, max {found.max} tokens"


def waste_text(s: RunSummary, tokens: Mapping[WasteCause, int]) -> str:
    """Return how many of the decoded tokens, and why."""
    causes = ", ".join(f"{cause} {n:,}" for cause, n in tokens.items() if n)
    total = f"{sum(tokens.values()):,} of {s.decoded_tokens:,} tokens ({s.fraction(tokens):.1%})"
    return f"{total}: {causes}" if causes else total


def phases_text(s: RunSummary) -> str:
    if not s.phase_s:
        return "–"
    return ", ".join(f"{phase} {share}%" for phase, share in phases.percentages(s.phase_s).items())


def bytes_text(num_bytes: int | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / 2**30:.2f} GiB"


def took_text(s: RunSummary) -> str:
    timed = f", {s.num_timed_steps:,} of them" if 0 < s.num_timed_steps < s.num_steps else ""
    return f"{s.num_steps:,} step{'s' * (s.num_steps != 1)}{timed} in {duration_text(s.loop_s)}"


def duration_text(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
