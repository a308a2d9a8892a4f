"""``rollover export``."""

from __future__ import annotations

from pathlib import Path

import click

from rollover.errors import require


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--step", type=click.IntRange(min=0), help="Export the checkpoint after STEP steps instead of the newest."
)
@click.option("--best", is_flag=True, help="Export the best checkpoint (eval.keep_best) instead of the newest.")
def command(run: Path, folder: Path, step: int | None, best: bool) -> None:
    """Write the model of RUN to FOLDER, in the format that Hugging Face tools read.

    Optimizer state is left out, and adapters (trainer.lora) are merged into the model that the run started from.

    \b
    rollover export runs/quickstart-20260101-120000 my-model
    """
    require("torch", purpose="rollover export")
    from rollover.run.export import best_step, export

    if best and step is not None:
        raise click.UsageError("give either --best or --step")
    step = best_step(run) if best else step
    checkpoint = export(run, folder, step=step)
    click.echo(f"model: {folder} ({checkpoint.name})")
