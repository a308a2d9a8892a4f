"""Draws what ``benchmarks/swarm.py`` has recorded: accuracy over steps and over wall-clock, means over seeds with 95 %
intervals.

    python benchmarks/swarm_figure.py benchmarks/results/swarm-2026-11-23.json quickstart docs/images/swarm-accuracy.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from drawing import figure

COLOURS = {"co-located": "#778", "pull": "#c33", "push-pull": "#27a"}
MARKERS = {"co-located": "s", "pull": "o", "push-pull": "D"}


def draw(summary: dict[str, Any], path: Path) -> None:
    """Draw accuracy over steps, and beside it over time."""
    with figure(path, columns=2, height=3.6, sharey=True) as (over_steps, over_time):
        _draw(summary, over_steps, over_time)


def _draw(summary: dict[str, Any], over_steps: Any, over_time: Any) -> None:
    for arm, found in summary["arms"].items():
        steps = sorted(map(int, found["accuracy_by_step"]))
        accuracy = [found["accuracy_by_step"][str(step)] for step in steps]
        mean, half = [a for a, _ in accuracy], [h or 0.0 for _, h in accuracy]
        times, spread = zip(*(found["time_by_step_s"][str(step)] for step in steps), strict=True)
        look = {"color": COLOURS[arm], "marker": MARKERS[arm], "ms": 4, "lw": 1.5, "label": arm}
        dashed = {**look, "ls": "--"} if arm == "co-located" else look
        over_steps.plot(steps, mean, **dashed)
        band = ([m - h for m, h in zip(mean, half, strict=True)], [m + h for m, h in zip(mean, half, strict=True)])
        over_steps.fill_between(steps, *band, color=COLOURS[arm], alpha=0.12, lw=0)
        over_time.errorbar(times, mean, xerr=[s or 0.0 for s in spread], yerr=half, capsize=2, elinewidth=0.8, **dashed)
    over_steps.set(xlabel="training steps", ylabel="accuracy on held-out prompts")
    over_time.set(xlabel="wall-clock seconds", xlim=(0, None))
    over_steps.legend(frameon=False, loc="lower right")


if __name__ == "__main__":
    file, task, image = sys.argv[1:]
    draw(json.loads(Path(file).read_text())["tasks"][task]["summary"], Path(image))
