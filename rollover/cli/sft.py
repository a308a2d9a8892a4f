"""``rollover sft``."""

from __future__ import annotations

from pathlib import Path

import click

from rollover.cli.command import ConfiguredCommand
from rollover.cli.start import run_options, start


@click.command("sft", cls=ConfiguredCommand)
@click.argument("config")
@run_options
@click.pass_context
def command(ctx: click.Context, config: str, run_dir: Path | None, dry_run: bool) -> None:
    """Fine-tune on worked solutions, without reinforcement learning.

    CONFIG is a TOML file or the name of a packaged experiment. Its [sft] section applies; without one, the defaults do.

    \b
    rollover sft quickstart --sft.num_steps 500
    """
    start(ctx, config, run_dir, dry_run, "sft")
