"""Runs side by side: a table for the terminal and a page of overlaid curves and aligned timelines.

Throughput is a ratio to the first run and always has lag and waste beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from rollover.batch import WasteCause
from rollover.report import captions, comparison_figures, measures
from rollover.report.page import Page, details, header, preformatted, table, tiles, write_page
from rollover.report.phases import percentages
from rollover.report.record import RunRecord, distinct_names, read_run
from rollover.report.run_report import WINDOW_STEPS, most_resumed, window_label
from rollover.report.summary import (
    RunSummary,
    accuracy_text,
    bytes_text,
    duration_text,
    number,
    steps_text,
    summarize,
)
from rollover.report.timeline_figure import aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """One measure of all runs.

    Example: ``ComparisonRow(name="trained tokens/s", texts=("1,000", "1,500"), values=(1000.0,
    1500.0)).ratios`` is ``(1.5,)``.
    """

    name: str
    texts: tuple[str, ...]
    values: tuple[float | None, ...] = ()
    """Empty where a ratio would say nothing."""

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Return the ratio of every run but the first to the first."""
        base, *others = self.values or (None,)
        return tuple(v / base if v is not None and base else None for v in others)


def comparison(summaries: Sequence[RunSummary]) -> tuple[ComparisonRow, ...]:
    """Return the measures side by side, throughput first, its price below it."""

    def row(
        name: str,
        text: Callable[[RunSummary], str],
        value: Callable[[RunSummary], float | None] | None = None,
    ) -> ComparisonRow:
        values = tuple(map(value, summaries)) if value is not None else ()
        return ComparisonRow(name=name, texts=tuple(map(text, summaries)), values=values)

    return (
        row("steps", lambda s: str(s.num_steps)),
        row(
            "trained tokens/s, whole loop",
            lambda s: number(s.trained_tokens_per_s, ",.0f"),
            lambda s: s.trained_tokens_per_s,
        ),
        row(
            "decoded tokens/s, rollout",
            lambda s: number(s.rollout_tokens_per_s, ",.0f"),
            lambda s: s.rollout_tokens_per_s,
        ),
        row("loop time", lambda s: duration_text(s.loop_s), lambda s: s.loop_s),
        row("time per step", lambda s: duration_text(_step_s(s)), _step_s),
        row("accuracy before", lambda s: accuracy_text(s.accuracy_before)),
        row("accuracy after", lambda s: accuracy_text(s.accuracy_after)),
        row("lag, mean over batches (versions)", lambda s: number(s.lag.batch if s.lag else None, ".2f")),
        row("lag, p95 / max", lambda s: f"{s.lag.p95} / {s.lag.max}" if s.lag else "–"),
        row("head lag, mean", lambda s: number(s.lag.head if s.lag else None, ".2f")),
        row("off-policy tokens", lambda s: number(s.lag.off_policy_fraction if s.lag else None, ".1%")),
        row("wasted by the rollout", lambda s: _waste(s, s.wasted_by_rollout)),
        row("without a gradient", lambda s: _waste(s, s.without_gradient)),
        row("re-prefilled tokens", lambda s: f"{s.reprefilled_tokens:,}"),
        row("resumes per sample", lambda s: number(s.resumes_per_sample, ".2f")),
        row("trained length, mean", lambda s: number(s.trained.mean if s.trained else None, ".1f")),
        row("length, trained / generated", lambda s: number(s.length_drift, ".2f")),
        row("time in rollout", lambda s: _share(s, "rollout")),
        row("time in training", lambda s: _share(s, "train")),
        row("peak memory", lambda s: bytes_text(s.peak_memory_bytes)),
    )


def _waste(s: RunSummary, tokens: Mapping[WasteCause, int]) -> str:
    return f"{sum(tokens.values()):,} ({s.fraction(tokens):.1%})"


def _share(s: RunSummary, phase: str) -> str:
    return f"{percentages(s.phase_s)[phase]}%" if s.phase_s else "–"


def _step_s(s: RunSummary) -> float | None:
    return s.loop_s / s.num_steps if s.loop_s and s.num_steps else None


def compare_table(records: Sequence[RunRecord]) -> Table:
    """Tabulate the runs for the terminal; the last columns are ratios to the first run."""
    names, summaries = distinct_names(records), [summarize(r.metrics, r.timeline) for r in records]
    found = Table(title=Text(" against ".join(names)), title_justify="left", title_style="bold")
    found.add_column("", style="dim", overflow="fold")
    for name in names:
        found.add_column(Text(name), justify="right", overflow="fold")
    for name in names[1:]:
        found.add_column(Text(f"{name} / {names[0]}"), justify="right", style="bold", overflow="fold")
    for row in comparison(summaries):
        found.add_row(row.name, *row.texts, *_ratio_texts(row, len(records)))
    return found


def _ratio_texts(row: ComparisonRow, num_runs: int) -> list[str]:
    ratios = row.ratios or (None,) * (num_runs - 1)
    return ["" if r is None else f"{r:.2f}×" for r in ratios]


def write_comparison(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write the side-by-side page of two or more runs to ``out``; the first run is the baseline.

    Raises:
        ValueError: there are fewer than two runs.
        RunError: one of them is not a run directory, or one of its files is damaged.
    """
    if len(run_dirs) < 2:
        raise ValueError(f"a comparison needs at least two runs, got {len(run_dirs)}")
    records = [read_run(d) for d in run_dirs]
    return write_page(out, render_comparison(records), private=any(r.has_secrets for r in records))


def render_comparison(records: Sequence[RunRecord]) -> str:
    names, summaries = distinct_names(records), [summarize(r.metrics, r.timeline) for r in records]
    page = Page(" against ".join(names) + " · Rollover")
    facts = [
        f"{name}: {steps_text(s.num_steps)} in {duration_text(s.loop_s)}"
        for name, s in zip(names, summaries, strict=True)
    ]
    page.add(header("Rollover comparison", " against ".join(names), facts))
    page.add(tiles(_headline(names, summaries)))
    page.section(
        "Learning",
        captions.LEARNING,
        page.figure("Over steps", comparison_figures.learning(records, over_time=False), "Nothing measured yet."),
        page.figure("Over wall-clock", comparison_figures.learning(records, over_time=True), "Nothing measured yet."),
    )
    _timelines(page, records, names)
    page.section(
        "Lag",
        captions.LAG,
        page.figure(
            "Lag of trained tokens", comparison_figures.lag_histograms(records), "No batch has been trained yet."
        ),
        page.figure("Head lag over steps", comparison_figures.head_lag(records), "No batch has been trained yet."),
    )
    page.section(
        "Time and lengths",
        captions.SPENT,
        page.figure("Where the time went", comparison_figures.time_spent(names, summaries), "No step has ended yet."),
        page.figure(
            "Trained response lengths", comparison_figures.trained_lengths(records), "No batch has been trained yet."
        ),
    )
    head = ["", *names, *(f"{name} / {names[0]}" for name in names[1:])]
    rows = [(row.name, *row.texts, *_ratio_texts(row, len(records))) for row in comparison(summaries)]
    page.section("Side by side", captions.COMPARED, f'<div class="card">{table(rows, head)}</div>')
    for name, record in zip(names, records, strict=True):
        page.add(details(f"Resolved configuration of {name}", preformatted(record.config)))
    return page.render()


def _headline(names: Sequence[str], summaries: Sequence[RunSummary]) -> list[tuple[str, str, str, str]]:
    """Return the last run's figures, with all runs' figures by name below; throughput is a ratio to the first."""
    rows = {row.name: row for row in comparison(summaries)}

    def tile(label: str, texts: Sequence[str], value: str | None = None) -> tuple[str, str, str, str]:
        note = " · ".join(f"{name}\N{NO-BREAK SPACE}{text}" for name, text in zip(names, texts, strict=True))
        return label, value or texts[-1], "", note

    def ratio(label: str, name: str) -> tuple[str, str, str, str]:
        row = rows[name]
        return tile(f"{label}, {names[-1]} over {names[0]}", row.texts, number(row.ratios[-1], ".2f", "×"))

    final = [s.accuracy_after or s.accuracy_before for s in summaries]
    return [
        ratio("Trained tokens/s", "trained tokens/s, whole loop"),
        ratio("Decoded tokens/s", "decoded tokens/s, rollout"),
        tile(f"Final accuracy of {names[-1]}", [number(a.value if a else None, ".1%") for a in final]),
        tile(f"Lag of {names[-1]}, versions", rows["lag, mean over batches (versions)"].texts),
        tile(f"Off-policy tokens of {names[-1]}", rows["off-policy tokens"].texts),
        tile(f"Wasted by the rollout of {names[-1]}", [f"{s.fraction(s.wasted_by_rollout):.1%}" for s in summaries]),
    ]


def _timelines(page: Page, records: Sequence[RunRecord], names: Sequence[str]) -> None:
    """Draw the same steps of every run on axes of the same length."""
    steps = _common_window(records)
    if steps is None:
        cards = [page.figure("", None, "The runs have no training step in common yet.")]
    else:
        shown = [measures.window_of(r.timeline, *steps) for r in records]
        drawn = aligned([(r.timeline, w) for r, w in zip(records, shown, strict=True)], time_title="seconds")
        cards = [
            page.figure(f"{name}, {window_label(w)}: {duration_text(w.end_s - w.start_s)}", figure, "")
            for name, w, figure in zip(names, shown, drawn, strict=True)
        ]
    page.section("Timelines", captions.ALIGNED, *cards, layout="column")


def _common_window(records: Sequence[RunRecord]) -> tuple[int, int] | None:
    """Return steps that all runs have: of the last run's stretches the one in which it resumes most."""
    common = set.intersection(*({s.step for s in r.timeline.steps} for r in records))
    if not common:
        return None
    stretches = measures.windows(records[-1].timeline, num_steps=WINDOW_STEPS, max_windows=len(common))
    found = [w for w in stretches if {w.first_step, w.last_step} <= common]
    if not found:
        return min(common), max(common)
    chosen = found[most_resumed(found)]
    return chosen.first_step, chosen.last_step
