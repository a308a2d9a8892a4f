"""``rollover calibrate``."""

from __future__ import annotations

from pathlib import Path

import click

from rollover.cli.command import OutputFile
from rollover.errors import require


@click.command("calibrate")
@click.option("--out", type=OutputFile(), required=True, metavar="FILE", help="Write the device to FILE (TOML).")
@click.option("--key", metavar="NAME", help="Call the device so; made of its title when left out.")
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Measure with the model in DIR, not one of random weights.",
)
@click.option("--device", default="auto", show_default=True, metavar="NAME", help="cpu, cuda or cuda:N.")
@click.option(
    "--from", "measured", type=click.Path(path_type=Path), metavar="FILE", help="Measurements made elsewhere (JSON)."
)
def command(out: Path, key: str | None, model: Path | None, device: str, measured: Path | None) -> None:
    """Measure this machine for the planner: decoding, prefill, training, copies.

    Takes minutes, on an idle machine. Every other time is held out, predicted from the rest, and compared. Elsewhere,
    python -m rollover.devices.measure FILE measures with torch alone, for --from.

    \b
    rollover calibrate --out mine.toml
    """
    require("scipy", *(() if measured else ("torch",)), purpose="rollover calibrate")
    from rollover.devices import job

    job.calibrate(out=out, key=key, model=model, device=device, measured=measured)
