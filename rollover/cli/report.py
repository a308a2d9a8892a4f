"""``rollover report``."""

from __future__ import annotations

from pathlib import Path

import click

from rollover.errors import require


@click.command("report")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--open", "open_browser", is_flag=True, help="Open it in the browser.")
def command(run: Path, open_browser: bool) -> None:
    """Write RUN/report.html, even while the run is in progress."""
    require("plotly", purpose="rollover report")
    from rollover.report.run_report import write_report

    path = write_report(run)
    click.echo(f"report: {path}")
    if open_browser:
        click.launch(str(path))
