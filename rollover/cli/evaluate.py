"""``rollover eval``."""

from __future__ import annotations

from pathlib import Path

import click

from rollover.cli.command import ConfiguredCommand
from rollover.cli.start import run_options, start


@click.command("eval", cls=ConfiguredCommand)
@click.argument("config", metavar="CONFIG|RUN")
@run_options
@click.pass_context
def command(ctx: click.Context, config: str, run_dir: Path | None, dry_run: bool) -> None:
    """Measure a model: pass@k on every evaluation source.

    Give a config, or a run directory to measure its newest checkpoint, into RUN/eval-DATE-TIME. If there are no
    evaluation sources, prompts come from the training sources.

    \b
    rollover eval runs/quickstart-20260101-120000
    rollover eval run.toml --model.path ./my-model --eval.samples_per_prompt 16 --eval.k '[1, 16]'
    """
    start(ctx, config, run_dir, dry_run, "evaluate")
