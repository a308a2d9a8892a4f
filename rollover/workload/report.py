"""The report of a fit: for the terminal, and as a workload file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rollover.settings import toml
from rollover.workload.fit import Fit, fit
from rollover.workload.law import LengthLaw
from rollover.workload.source import read_trace
from rollover.workload.trace import Trace

_LABELS = {
    "median_tokens": "median",
    "sigma": "sigma",
    "icc": "share common to siblings (icc)",
    "loop_probability": "loops",
    "drift_per_1k_prompts": "drift over 1,000 prompts",
}


def law_toml(law: LengthLaw, comments: tuple[str, ...] = ()) -> str:
    """Return the law as a workload file."""
    values = {key: float(f"{v:.5g}") if isinstance(v, float) else v for key, v in asdict(law).items()}
    return "".join(f"# {comment}\n" for comment in comments) + toml.dumps(values)


def verdict(fit: Fit) -> str:
    """Return a sentence on how well the law fits."""
    compared = f"KS distance {fit.ks:.3f}; traces drawn from the law itself average {fit.ks_expected:.3f}, 95% of them"
    compared += f" below {fit.ks_p95:.3f}"
    if fit.follows:
        return f"{compared}: the law explains this trace"
    return f"{compared}: the law is an approximation here; use the trace itself for simulations where it matters"


def described(trace: Trace) -> str:
    num_unfinished = sum(len(p.unfinished) for p in trace.prompts)
    cut = f", {num_unfinished:,} of them cut off before their end" if num_unfinished else ""
    return f"{trace.num_samples:,} responses to {len(trace.prompts):,} prompts{cut}; cap {trace.cap_tokens:,} tokens"


def parameter_rows(fit: Fit) -> list[tuple[str, str, str]]:
    """Return rows of (name, value, standard error)."""
    rows = []
    for key, label in _LABELS.items():
        value = getattr(fit.law, key)
        if key == "drift_per_1k_prompts" and value == 0:
            continue
        error = fit.standard_errors.get(key)
        if key == "median_tokens":
            rows.append((label, f"{value:,.0f} tokens", "–" if error is None else f"± {error * value:,.0f}"))
        elif key == "loop_probability":
            rows.append((label, f"{value:.2%}", "–" if error is None else f"± {error:.2%}"))
        else:
            rows.append((label, f"{value:.3f}", "–" if error is None else f"± {error:.3f}"))
    return rows


def length_rows(trace: Trace, law: LengthLaw) -> list[tuple[str, str, str]]:
    """Return rows of (measure, trace, law)."""
    found = trace.empirical_law()
    below_cap = float(found.at(np.array([trace.cap_tokens - 1]))[0])
    rows = [("mean", f"{found.mean(trace.cap_tokens):,.0f}", f"{law.mean_tokens:,.0f}")]
    for p in (0.5, 0.9, 0.95, 0.99):
        rows.append((f"p{100 * p:.0f}", f"{found.quantile(p, trace.cap_tokens):,}", f"{law.quantile(p):,}"))
    return [*rows, ("at the cap", f"{1 - below_cap:.1%}", f"{law.truncated:.1%}")]


def fit_table(trace: Trace, fit: Fit) -> Table:
    shown = Table(title=f"{trace.name}: {described(trace)}", title_justify="left", title_style="bold")
    for column in ("", "fitted", "standard error"):
        shown.add_column(column, justify="left" if not column else "right")
    for row in parameter_rows(fit):
        shown.add_row(*row)
    shown.add_section()
    shown.add_row("[dim]response tokens[/]", "[dim]trace[/]", "[dim]law[/]")
    for row in length_rows(trace, fit.law):
        shown.add_row(*row)
    return shown


def fit_workload(source: str, *, cap_tokens: int | None, out: Path | None) -> None:
    """Fit the length law to the run or file ``source``; the workload file goes to ``out``, or to the terminal.

    Raises:
        DataError: the lengths are unusable or too few.
        RunError: ``source`` is a directory, but not a run's.
    """
    trace = read_trace(source, cap_tokens=cap_tokens)
    found = fit(trace)
    console = Console(highlight=False)
    console.print(fit_table(trace, found))
    console.print(f"{verdict(found)}.")
    text = law_toml(found.law, (f"Fitted to {trace.name}: {described(trace)}.", f"{verdict(found)}."))
    if out is None:
        console.print(f"\n{text}", end="", markup=False, soft_wrap=True)
    else:
        out.write_text(text, encoding="utf-8")
        console.print(f"workload: {out}")
