"""What the figures of benchmarks have in common: the same record gives the same file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt


@contextmanager
def figure(path: Path, *, rows: int = 1, columns: int, height: float, **options: Any) -> Iterator[Any]:
    """Hand out the panels of a figure, and write it to ``path`` at the end."""
    matplotlib.rcParams |= {
        "svg.hashsalt": path.stem,
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    drawn, panels = plt.subplots(rows, columns, figsize=(9.5, height), **options)
    yield panels
    drawn.tight_layout()
    drawn.savefig(path, metadata={"Date": None})
    plt.close(drawn)
