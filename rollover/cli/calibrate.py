"""``rollover calibrate``."""

from __future__ import annotations

from pathlib import Path

import click

from rollover.cli.command import OutputFile
from rollover.errors import require


@click.command("calibrate")
@click.option("--out", type=OutputFile(), required=True, metavar="FILE", help="Write the device to FILE (TOML).")
@click.option("--key", metavar="NAME", help="Key of the device; derived from its title when left out.")
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Measure with the model in DIR instead of one with random weights.",
)
@click.option("--device", default="auto", show_default=True, metavar="NAME", help="cpu, cuda or cuda:N.")
def command(out: Path, key: str | None, model: Path | None, device: str) -> None:
    """Measure this machine for the planner: decoding, prefill, training and copies.

    This takes a few minutes; the machine should be idle. Every second measurement is held out, predicted from the
    others, and compared.

    \b
    rollover calibrate --out mine.toml
    """
    require("scipy", "torch", purpose="rollover calibrate")
    from rollover.devices.fit import calibrate

    calibrate(out=out, key=key, model=model, device=device)
