"""``rollover calibrate``: measure, fit, report how well the fit predicts, and write the device to a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollover.devices.fit import ACCURACY, Calibration, entry, fit
from rollover.devices.measurements import Measurements
from rollover.errors import DataError, ModelError


def calibrate(
    *, out: Path, key: str | None = None, model: Path | None = None, device: str = "auto", measured: Path | None = None
) -> Calibration:
    """Measure this machine, or read measurements made elsewhere from ``measured``; write the entry to ``out``.

    Raises:
        DataError: ``measured`` contains no measurements.
        ModelError: ``model`` is not a model folder.
    """
    console = Console(highlight=False)
    found = _measured(model, device) if measured is None else _read(measured)
    key = key or re.sub(r"[^a-z0-9]+", "-", found.title.lower()).strip("-")
    calibration = fit(found, key)
    console.print(_table(calibration))
    verdict = "within" if calibration.worst <= ACCURACY else "NOT within"
    text = f"Held-out times are predicted to {calibration.worst:.0%}, {verdict} {ACCURACY:.0%}"
    if calibration.worst > ACCURACY:
        text += ": measure again on an idle machine, or with the model you will use"
    console.print(f"{text}.", markup=False)
    comment = f"# {found.title}, measured by rollover calibrate; {text[0].lower()}{text[1:]}.\n"
    out.write_text(comment + entry(calibration, key), encoding="utf-8")
    console.print(f"device {key!r}: {out}; list the file under catalogues in a fleet file", markup=False)
    return calibration


def _measured(model: Path | None, device: str) -> Measurements:
    from rollover.devices.measure import measure

    if model is not None and not (model / "config.json").is_file():
        raise ModelError(f"{model} is not a model folder: it has no config.json")
    return measure(model, device=device)


def _read(file: Path) -> Measurements:
    try:
        return Measurements.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{file} was not written by rollover.devices.measure: {error}") from None


def _table(calibration: Calibration) -> Table:
    table = Table("", "measured, ms", "predicted, ms", "error", "")
    for p in calibration.predictions:
        held = "held out" if p.held_out else ""
        table.add_row(
            Text(p.what), f"{1e3 * p.measured_s:,.2f}", f"{1e3 * p.predicted_s:,.2f}", f"{p.error:+.1%}", held
        )
    return table
