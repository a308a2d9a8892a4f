"""Runs side by side, as tables for the terminal: throughput with its ratio to the first run, then lag and waste."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from rollover.batch import WasteCause
from rollover.report.phases import percentages
from rollover.report.record import RunRecord
from rollover.report.summary import RunSummary, accuracy_text, bytes_text, duration_text, number, summarize

ROWS: Mapping[str, Callable[[RunSummary], str]] = {
    "steps": lambda s: str(s.num_steps),
    "trained tokens/s, whole loop": lambda s: number(s.trained_tokens_per_s, ",.0f"),
    "decoded tokens/s, rollout": lambda s: number(s.rollout_tokens_per_s, ",.0f"),
    "loop time": lambda s: duration_text(s.loop_s),
    "time per step": lambda s: duration_text(_step_s(s)),
    "reward, first → last tenth": lambda s: f"{number(s.reward_first, '.3f')} → {number(s.reward_last, '.3f')}",
    "accuracy before": lambda s: accuracy_text(s.accuracy_before),
    "accuracy after": lambda s: accuracy_text(s.accuracy_after),
    "lag, mean over batches (versions)": lambda s: number(s.lag.batch if s.lag else None, ".2f"),
    "lag, p95 / max": lambda s: f"{s.lag.p95} / {s.lag.max}" if s.lag else "–",
    "head lag, mean": lambda s: number(s.lag.head if s.lag else None, ".2f"),
    "off-policy tokens": lambda s: number(s.lag.off_policy_fraction if s.lag else None, ".1%"),
    "wasted by the rollout": lambda s: _waste(s, s.wasted_by_rollout),
    "without a gradient": lambda s: _waste(s, s.without_gradient),
    "re-prefilled tokens": lambda s: f"{s.reprefilled_tokens:,}",
    "resumes per sample": lambda s: number(s.resumes_per_sample, ".2f"),
    "trained length, mean": lambda s: number(s.trained.mean if s.trained else None, ".1f"),
    "length, trained / generated": lambda s: number(s.length_drift, ".2f"),
    "time in rollout": lambda s: _share(s, "rollout"),
    "time in training": lambda s: _share(s, "train"),
    "peak memory": lambda s: bytes_text(s.peak_memory_bytes),
}
"""Name and text of each measure."""
_RATIOS: Mapping[str, Callable[[RunSummary], float | None]] = {
    "trained tokens/s, whole loop": lambda s: s.trained_tokens_per_s,
    "decoded tokens/s, rollout": lambda s: s.rollout_tokens_per_s,
    "loop time": lambda s: s.loop_s,
    "time per step": lambda s: _step_s(s),
}
"""The measures whose ratios say something."""


_LABEL_WIDTH, _RUN_WIDTH = 24, 18
"""Characters that a column should have."""


def compare_tables(records: Sequence[RunRecord], width: int) -> Iterator[Table]:
    """Tabulate the runs, as many beside each other as fit into ``width`` characters. Names that repeat are numbered."""
    summaries = [summarize(r.metrics, r.timeline) for r in records]
    count = Counter(r.name for r in records)
    names = [r.name if count[r.name] == 1 else f"{r.name} ({i})" for i, r in enumerate(records, start=1)]
    size = max(1, (width - _LABEL_WIDTH) // _RUN_WIDTH)
    for start in range(0, len(records), size):
        shown = slice(start, start + size)
        found = Table(title=Text(f"ratios are to {names[0]}"), title_justify="left", title_style="bold")
        found.add_column("", style="dim", overflow="fold")
        for name in names[shown]:
            found.add_column(Text(name), justify="right", overflow="fold")
        for name, text in ROWS.items():
            found.add_row(name, *(text(s) + _ratio(name, s, summaries[0]) for s in summaries[shown]))
        yield found


def _ratio(name: str, s: RunSummary, first: RunSummary) -> str:
    """Return the ratio of a measure to the first run's, if it says something."""
    value, base = (_RATIOS[name](one) if name in _RATIOS else None for one in (s, first))
    return "" if s is first or value is None or not base else f" ({value / base:.2f}×)"


def _waste(s: RunSummary, tokens: Mapping[WasteCause, int]) -> str:
    return f"{sum(tokens.values()):,} ({s.fraction(tokens):.1%})"


def _share(s: RunSummary, phase: str) -> str:
    return f"{percentages(s.phase_s)[phase]}%" if s.phase_s else "–"


def _step_s(s: RunSummary) -> float | None:
    return s.loop_s / s.num_timed_steps if s.loop_s else None
