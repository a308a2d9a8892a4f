"""A wall clock that somebody sets while a process runs."""

from __future__ import annotations

import time
from pathlib import Path

FILE_NAME = "clock.offset"


def set_clocks(folder: Path, seconds: float) -> None:
    """Set the wall clocks of the processes in ``folder`` so many seconds ahead of this machine's; below 0 behind."""
    beside = folder / f"{FILE_NAME}.new"
    beside.write_text(f"{seconds}")
    beside.replace(folder / FILE_NAME)


def follow_clock(folder: Path) -> None:
    """From now on the wall clock of this process is what ``set_clocks`` says. Its monotonic clock is as it was: that is
    what the system promises of one, whoever sets the other."""
    true_s, file = time.time, folder / FILE_NAME

    def now_s() -> float:
        try:
            return true_s() + float(file.read_text())
        except FileNotFoundError:
            return true_s()

    time.time = now_s  # for good: the process ends with its run
    time.time_ns = lambda: int(now_s() * 1e9)
