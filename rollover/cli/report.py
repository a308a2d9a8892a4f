"""``rollover report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click


@click.command("report")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--open", "open_browser", is_flag=True, help="Open it in the browser.")
@click.option("--serve", is_flag=True, help="Serve it on this machine instead, always up to date, until Ctrl-C.")
@click.option("--port", type=click.IntRange(0, 65535), help="With --serve: 8377 by default, 0 for any that is free.")
def command(run: Path, open_browser: bool, serve: bool, port: int | None) -> None:
    """Write RUN/report.html, even while the run is in progress. Of a comparison, print the table of its runs."""
    if serve:
        _serve(run, 8377 if port is None else port, open_browser=open_browser)
        return
    if port is not None:
        raise click.UsageError("--port has no effect without --serve")
    from rollover.report.record import compared_runs, read_config, read_run
    from rollover.report.run_report import write_report
    from rollover.report.summary import summarize

    if runs := compared_runs(run, read_config(run)):
        if open_browser:
            raise click.UsageError("--open has no effect for a comparison: give one of its runs")
        _compare([path for path in runs if (path / "config.json").exists()])
        return
    record = read_run(run)
    for alarm in summarize(record.metrics, record.timeline, record.config).alarms:
        click.echo(f"alarm: {alarm}")
    path = write_report(run, record)
    click.echo(f"report: {path}")
    if open_browser:
        click.launch(str(path))


def _compare(runs: Sequence[Path]) -> None:
    from rich.console import Console

    from rollover.report.comparison import compare_tables
    from rollover.report.record import read_run

    console = Console()
    console.print(*compare_tables([read_run(path) for path in runs], console.width))


def _serve(run: Path, port: int, *, open_browser: bool) -> None:
    """Serve the live page until Ctrl-C, which ends it with exit code 0."""
    from rollover.report.live import HOST, open_server

    with open_server(run, port) as server:
        url = f"http://{HOST}:{server.server_port}/"
        click.echo(f"report: {url} (Ctrl-C ends it)")
        if open_browser:
            click.launch(url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo()
