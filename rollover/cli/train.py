"""``rollover train``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from rollover.cli.command import OVERRIDES, ConfiguredCommand
from rollover.cli.start import run_options, show_plan, start, work
from rollover.errors import require

DEFAULT_EXPERIMENT = "quickstart"


@click.command("train", cls=ConfiguredCommand)
@click.argument("config", required=False)
@click.option("--resume", metavar="RUN", type=click.Path(path_type=Path), help="Resume the run in RUN.")
@click.option(
    "--skip-batch",
    metavar="STEP",
    type=click.IntRange(min=0),
    help="With --resume: skip the batch of STEP, which cannot be trained; its tokens count as wasted.",
)
@run_options
@click.pass_context
def command(
    ctx: click.Context,
    config: str | None,
    resume: Path | None,
    skip_batch: int | None,
    run_dir: Path | None,
    dry_run: bool,
) -> None:
    """Train a model, or resume a run.

    CONFIG is a TOML file or the name of a packaged experiment; quickstart when left out.

    \b
    rollover train                                    the quickstart, a few minutes on a laptop
    rollover train run.toml --trainer.learning_rate 2e-6
    rollover train --resume runs/quickstart-20260101-120000
    """
    from rollover.run import directory

    overrides = ctx.meta[OVERRIDES]
    if skip_batch is not None and (resume is None or dry_run):
        raise click.UsageError("--skip-batch applies to a resumed run: give --resume RUN, without --dry-run", ctx)
    if resume is None:
        start(ctx, config or DEFAULT_EXPERIMENT, run_dir, dry_run, "train")
        return
    if config is not None or run_dir is not None:
        other = "--run-dir" if config is None else "CONFIG"
        raise click.UsageError(
            f"--resume reads the config of its run and writes to its directory; leave out {other}", ctx
        )
    require("torch", purpose=ctx.command_path)
    if dry_run:
        from rollover.run.prepare import check_resume

        saved = directory.saved_config(resume, overrides)
        check_resume(saved, resume)
        show_plan(ctx, saved)
        return
    work(ctx, "train", *directory.open_for_resume(resume, overrides, sys.argv), skip_batch=skip_batch)
