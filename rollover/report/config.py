"""Settings that decide where the numbers of a run go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["auto", "bars", "plain", "off"]
"""How progress is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """Section ``[logging]``. ``metrics.jsonl`` is always written: the report is drawn from it."""

    tensorboard: bool = True
    """Write TensorBoard event files to ``RUN/tensorboard``."""
    wandb: str | None = None
    """Weights & Biases project to log to; needs ``pip install 'rollover[wandb]'``."""
    trackio: str | None = None
    """Trackio project to log to; needs ``pip install 'rollover[trackio]'``."""
    run_name: str | None = None
    """Name of the run at W&B and Trackio; the run directory's name when not given."""
    progress: Mode = "auto"
    """``auto`` draws bars on a terminal and prints plain lines elsewhere."""
    plain_every_steps: int = 10
    """Plain progress: training steps between two lines, each with the means since the one before. The last step always
    prints."""

    def __post_init__(self) -> None:
        if self.plain_every_steps < 1:
            raise ValueError(f"logging.plain_every_steps must be at least 1, got {self.plain_every_steps}")
        for key, project in (("wandb", self.wandb), ("trackio", self.trackio)):
            if project is not None and not project.strip():
                raise ValueError(f"logging.{key} must name a project, got {project!r}; leave it out to switch it off")
