"""``rollover workload fit``: the length law fitted to recorded response lengths."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console


def fit_workload(source: str, *, cap_tokens: int | None, page: Path | None, out: Path | None) -> None:
    """Fit the length law to the run or file ``source``; the workload file goes to ``out``, or to the terminal.

    Raises:
        DataError: the lengths are unusable or too few.
        RunError: ``source`` is a directory, but not that of a run.
    """
    from rollover.report.page import write_page
    from rollover.workload.fit import fit
    from rollover.workload.report import described, fit_table, law_toml, render_fit, verdict
    from rollover.workload.source import read_trace

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
