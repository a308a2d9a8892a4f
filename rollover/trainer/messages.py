"""The messages between the process of the run and the ranks of its trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollover.trainer.setup import SFTSetup, TrainingSetup

LOGITS = "logits.npy"
"""The file into which rank 0 writes its logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkMeeting:
    """The place where ranks on several machines meet."""

    host: str
    """Address of the machine of rank 0."""
    port: int
    own: str
    """Address of the rank's own machine, at which the others reach it."""
    descriptor: int | None = None
    """Number of the listening socket that rank 0 inherits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """The first message to a rank."""

    rank: int
    size: int
    device: str
    """PyTorch's name of the device."""
    num_threads: int
    folder: Path
    """Folder in which ranks of one machine meet and exchange large values."""
    timeout_s: float
    """Deadline of each collective."""
    setup: TrainingSetup | SFTSetup
    model: Path
    """The model that the run began with."""
    resume_from: Path | None
    meeting: NetworkMeeting | None = None
    """Address at which ranks of several machines meet."""


@dataclass(frozen=True, slots=True)
class Done:
    """A command was carried out. Example: ``Done(None)``."""

    result: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """A command failed, and the rank has ended."""

    kind: str
    """The class in ``rollover.errors`` nearest to the error's; empty for any other, unexpected error."""
    message: str
    is_secondary: bool
    """True if it was caused by waiting for another rank, which failed first."""
