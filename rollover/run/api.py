"""``rollover.train``: trains from Python as ``rollover train`` does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rollover.errors import ConfigError, RunError, missing_extra, require
from rollover.run import directory, jobs
from rollover.run.building import build_config
from rollover.run.config import RunConfig


def train(config: RunConfig | str | Path, overrides: Sequence[str] = (), *, run_dir: str | Path | None = None) -> Path:
    """Train as ``rollover train`` does, and return the run directory.

    Args:
        config: a TOML file, the name of a packaged experiment, or a config object.
        overrides: settings as on the command line, applied to a file or an experiment.
        run_dir: the run's directory; ``runs/CONFIG-DATE-TIME`` when left out.

    Raises:
        RolloverError: the message says what you can do about it. In a notebook, whose thread runs an event loop, that
            is ``await asyncio.to_thread(rollover.train, ...)``. It then ends with the kernel only, and can be resumed.
        Stopped: Ctrl-C ended the run early, cleanly; ``rollover train --resume`` continues it.

    Example:
        ``rollover.train("quickstart", ["--steps", "5"], run_dir="out")`` trains five steps and returns ``Path("out")``,
        with ``out/report.html`` in it.
    """
    require("torch", purpose="rollover.train")
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise RunError(
            "rollover.train needs a thread without an event loop, and this one runs a loop, as a notebook's does: "
            "await asyncio.to_thread(rollover.train, ...)"
        )
    if isinstance(config, RunConfig) and overrides:
        raise ConfigError("overrides are for a file or an experiment: change a RunConfig with dataclasses.replace")
    made = config if isinstance(config, RunConfig) else build_config(config, overrides)
    name = "run" if isinstance(config, RunConfig) else Path(config).stem
    path = directory.default_path(name) if run_dir is None else Path(run_dir)
    with directory.create(made, path) as run:
        try:
            jobs.train(made, run)
        except ModuleNotFoundError as error:
            raise missing_extra(error) or error from None
    return path
