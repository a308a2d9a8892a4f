"""Settings for the destinations of a run's metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["auto", "bars", "plain", "off"]
"""The display of progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """Section ``[logging]``: where metrics go besides ``metrics.jsonl``, which is always written, because the report is
    drawn from it."""

    tensorboard: bool = True
    """Write TensorBoard event files to ``RUN/tensorboard``."""
    wandb: str | None = None
    """Weights & Biases project to log to; needs ``pip install 'rollover[wandb]'``."""
    trackio: str | None = None
    """Trackio project to log to; needs ``pip install 'rollover[trackio]'``."""
    samples_every_steps: int = 10
    """Training steps from one table of samples at W&B and Trackio to the next: a dozen prompts and responses, with
    secrets blanked. 0 sends none."""
    run_name: str | None = None
    """Name of the run at W&B and Trackio, which appends what tells runs apart; by default the run directory's name."""
    progress: Mode = "auto"
    """``auto`` draws bars on a terminal and prints plain lines elsewhere."""
    plain_every_steps: int = 10
    """Training steps per line of plain progress; each line shows the means since the previous one. The last step always
    prints."""

    def __post_init__(self) -> None:
        if self.plain_every_steps < 1:
            raise ValueError(f"logging.plain_every_steps must be at least 1, got {self.plain_every_steps}")
        if self.samples_every_steps < 0:
            raise ValueError(f"logging.samples_every_steps must be at least 0, got {self.samples_every_steps}")
        for key, project in (("wandb", self.wandb), ("trackio", self.trackio)):
            if project is not None and not project.strip():
                raise ValueError(f"logging.{key} must name a project, got {project!r}; omit it to switch it off")
