"""``rollover calibrate``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollover.cli.command import OutputFile
from rollover.errors import ModelError, require

if TYPE_CHECKING:
    from rollover.devices.fit import Calibration

_ACCURACY = 0.15
"""Relative error of predictions that a calibration should not exceed."""


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
    from rollover.devices.fit import entry, fit
    from rollover.devices.measure import measure

    if model is not None and not (model / "config.json").is_file():
        raise ModelError(f"{model} is not a model folder: it has no config.json")
    found = measure(model, device=device)
    key = key or re.sub(r"[^a-z0-9]+", "-", found.title.lower()).strip("-")
    calibration = fit(found, key)
    _print(calibration)
    verdict = "within" if calibration.worst <= _ACCURACY else "NOT within"
    text = f"held-out times are predicted to {calibration.worst:.0%}, {verdict} {_ACCURACY:.0%}"
    if calibration.worst > _ACCURACY:
        text += ": measure again on an idle machine, or with the model you will use"
    comment = f"# {found.title}, measured by rollover calibrate; {text}.\n"
    out.write_text(comment + entry(calibration.device), encoding="utf-8")
    click.echo(f"device {key!r}: {text}\n{out}: list it under catalogues in a fleet file, or give it to --catalogue")


def _print(calibration: Calibration) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "samples", "tokens each", "measured, ms", "predicted, ms", "error", "")
    for point, error in calibration.errors:
        table.add_row(
            point.work,
            str(point.count),
            f"{point.tokens:.0f}",
            f"{1e3 * point.seconds:,.2f}",
            f"{1e3 * point.seconds * (1 + error):,.2f}",
            f"{error:+.1%}",
            "held out" if point.held_out else "",
        )
    Console(highlight=False).print(table)
