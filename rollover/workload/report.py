"""The report of a fit: for the terminal, as a workload file and as a page."""

from __future__ import annotations

from dataclasses import asdict
from html import escape
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rollover.report.page import Page, header, table, tiles, write_page
from rollover.report.plot import Figure, axis, figure, line
from rollover.settings import toml
from rollover.workload.fit import Fit, fit
from rollover.workload.law import Floats, LengthLaw
from rollover.workload.source import read_trace
from rollover.workload.trace import Trace

_LABELS = {
    "median_tokens": "median",
    "sigma": "sigma",
    "icc": "share common to siblings (icc)",
    "loop_probability": "loops",
    "drift_per_1k_prompts": "drift over 1,000 prompts",
    "tail_exponent": "exponent of the Pareto tail",
}
_POINTS = 160
_DENSITY = (
    "Response lengths on a logarithmic axis. The last bar holds the responses cut at the cap: loops, and the part of"
    " the tail beyond it."
)
_TAIL = (
    "The share of responses longer than x, both axes logarithmic. A lognormal tail bends down; a Pareto tail is a"
    " straight line. The right end decides how long a synchronous step waits."
)
_SURE = "Maximum likelihood; cut samples are lower bounds, siblings correlated; standard errors from its curvature."


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
        if value is None or (key == "drift_per_1k_prompts" and value == 0):
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


def render_fit(trace: Trace, fit: Fit) -> str:
    """Return the page of a fit: lengths, tail, parameters, and the workload file."""
    law = fit.law
    page = Page(f"{trace.name} · Rollover workload")
    page.add(header("Rollover workload", trace.name, [described(trace)]))
    mean, *_, p99, truncated = length_rows(trace, law)
    page.add(
        tiles(
            [
                ("Mean response", mean[1], "tokens", f"law: {mean[2]}"),
                ("99th percentile", p99[1], "tokens", f"law: {p99[2]}"),
                ("Cut at the cap", truncated[1], "", f"law: {truncated[2]}, of which {law.loop_probability:.1%} loops"),
                (
                    "Siblings alike",
                    f"{law.icc:.2f}",
                    "icc",
                    "share of the spread common to a prompt's samples",
                ),
                ("KS distance", f"{fit.ks:.3f}", "", f"by chance {fit.ks_expected:.3f}, 95% below {fit.ks_p95:.3f}"),
            ]
        )
    )
    page.section("Lengths", _DENSITY, page.figure("", _density(trace, law), ""), layout="column")
    page.section("Tail", _TAIL, page.figure("", _tail(trace, law), ""), layout="column")
    cards = [table(parameter_rows(fit), ["", "fitted", "standard error"])]
    cards += [table(length_rows(trace, law), ["response tokens", "trace", "law"])]
    page.section("In numbers", f"{_SURE} {verdict(fit)}.", *(f'<div class="card">{c}</div>' for c in cards))
    page.add(f"<section><h2>Workload file</h2><div class='card'><pre>{escape(law_toml(law))}</pre></div></section>")
    return page.render()


def _grid(trace: Trace) -> Floats:
    """Return whole lengths, evenly spaced on a logarithmic axis, up to just below the cap."""
    shortest = min(n for p in trace.prompts for n in p.lengths)
    edges = np.geomspace(max(shortest, 1), max(trace.cap_tokens - 1, shortest + 1), _POINTS)
    return np.unique(np.floor(edges))


def _density(trace: Trace, law: LengthLaw) -> Figure:
    edges = np.unique(np.floor(_grid(trace)[:: max(1, _POINTS // 40)]))
    edges = np.append(edges[edges < trace.cap_tokens - 1], trace.cap_tokens - 1)
    last = trace.cap_tokens * edges[-1] / edges[-2]  # as wide as its neighbour, and all of it is the cap
    middles = [*((edges[1:] + edges[:-1]) / 2).tolist(), (trace.cap_tokens + last) / 2]
    widths = [*np.diff(edges).tolist(), last - trace.cap_tokens]
    data = []
    for name, cdf in (("trace", trace.empirical_law().at), ("law", law.cdf)):
        at = cdf(edges)
        at[0] = 0.0  # the shortest belong to the first bar
        shares = [*np.diff(at).tolist(), float(1 - at[-1])]
        if name == "trace":
            marker = {"color": "--soft", "line": {"width": 0}}
            data.append({"type": "bar", "x": middles, "y": shares, "width": widths, "name": name, "marker": marker})
        else:
            data.append(line(middles, shares, name, "--blue", mode="lines+markers", marker={"size": 4}))
        data[-1]["hovertemplate"] = "about %{x:,.0f} tokens: %{y:.1%}"
    x_axis = axis("response tokens", type="log", showgrid=False, tickformat=",d")
    y_axis = axis("share of responses", tickformat=".0%", rangemode="tozero")
    return figure(data, height=330, xaxis=x_axis, yaxis=y_axis, barmode="overlay", bargap=0)


def _tail(trace: Trace, law: LengthLaw) -> Figure:
    x = _grid(trace)
    data = []
    for name, colour, cdf in (("trace", "--orange", trace.empirical_law().at), ("law", "--blue", law.cdf)):
        longer = 1 - cdf(x)
        shown = longer > 0
        shape = {"line": {"color": colour, "width": 2.2, "shape": "hv" if name == "trace" else "linear"}}
        curve = line(x[shown].tolist(), longer[shown].tolist(), name, colour, **shape)
        data.append({**curve, "hovertemplate": "longer than %{x:,.0f} tokens: %{y:.2%}"})
    x_axis = axis("response tokens", type="log", showgrid=False, tickformat=",d")
    y_axis = axis("share of responses longer than that", type="log", tickformat=".1~%", dtick="D2")
    return figure(data, height=330, xaxis=x_axis, yaxis=y_axis)


def fit_workload(source: str, *, cap_tokens: int | None, page: Path | None, out: Path | None) -> None:
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
    if page is not None:
        console.print(f"page: {write_page(page, render_fit(trace, found))}")
