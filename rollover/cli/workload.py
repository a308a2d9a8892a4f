"""``rollover workload``."""

from __future__ import annotations

from pathlib import Path

import click

from rollover.cli.command import Commands, Count, OutputFile
from rollover.errors import require


@click.group("workload", cls=Commands)
def command() -> None:
    """Work with response lengths for simulation and planning."""


@command.command()
@click.argument("source", metavar="RUN|FILE")
@click.option("--cap", type=Count(min=1), metavar="TOKENS", help="Cap on the lengths in FILE.")
@click.option(
    "--out", type=OutputFile(), metavar="FILE", help="Write the workload to FILE (TOML) instead of the terminal."
)
def fit(source: str, cap: int | None, out: Path | None) -> None:
    """Fit a workload to recorded response lengths, and say how well it fits.

    RUN is a run directory. FILE is a .jsonl or .parquet file of lengths, with a row for each sample (prompt, length) or
    for each prompt (prompt, lengths). Without --cap, the longest response in FILE is assumed to have reached the cap.

    \b
    rollover workload fit runs/quickstart-20260101-120000
    rollover workload fit lengths.jsonl --cap 16384 --out mine.toml
    """
    require("scipy", purpose="rollover workload fit")
    from rollover.workload.report import fit_workload

    fit_workload(source, cap_tokens=cap, out=out)
