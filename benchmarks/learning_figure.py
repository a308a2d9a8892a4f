"""Draws what ``benchmarks/learning.py`` has recorded of schedules and algorithms: accuracy over steps and over decoded
tokens, means over seeds. Bars are the 95 % intervals of the differences from ``sync``, which are paired by seed.

    python benchmarks/learning_figure.py benchmarks/results/learning-algorithms-2026-11-28.json docs/images/accuracy.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from drawing import figure

from rollover.frontier.sweep import MeanOverSeeds

COLOURS = {"sync": "#778", "april": "#c33", "rollover": "#27a"}


def draw(seeds: list[dict[str, Any]], path: Path) -> None:
    """Draw a column of two panels for each algorithm: accuracy over steps, and below it over tokens."""
    algorithms = list(dict.fromkeys(name.split("-")[1] for name in seeds[0]))
    with figure(path, rows=2, columns=len(algorithms), height=5.4, sharey=True, squeeze=False) as panels:
        _draw(seeds, algorithms, panels)


def _draw(seeds: list[dict[str, Any]], algorithms: list[str], panels: Any) -> None:
    for column, algorithm in enumerate(algorithms):
        over_steps, over_tokens = panels[0][column], panels[1][column]
        for strategy, colour in COLOURS.items():
            runs = [seed[f"{strategy}-{algorithm}"] for seed in seeds]
            steps = list(runs[0]["accuracy"])
            sync = [seed[f"sync-{algorithm}"]["accuracy"] for seed in seeds]
            pairs = list(zip((run["accuracy"] for run in runs), sync, strict=True))
            mean = [sum(ours[step] for ours, _ in pairs) / len(pairs) for step in steps]
            margin = [MeanOverSeeds.of([ours[s] - theirs[s] for ours, theirs in pairs]).margin or 0.0 for s in steps]
            tokens = [sum(run["decoded_tokens"].get(step, 0) for run in runs) / len(runs) / 1e3 for step in steps]
            for panel, places in ((over_steps, list(map(int, steps))), (over_tokens, tokens)):
                panel.errorbar(
                    places, mean, yerr=margin, color=colour, capsize=2, lw=1.3, elinewidth=0.7, label=strategy
                )
        over_steps.set(title=algorithm.upper(), xlabel="training steps")
        over_tokens.set(xlabel="thousand decoded tokens", xlim=(0, None))
    for row in panels:
        row[0].set(ylabel="accuracy")
    panels[0][0].legend(frameon=False, loc="lower right")


if __name__ == "__main__":
    record, image = map(Path, sys.argv[1:])
    draw(json.loads(record.read_text())["seeds"], image)
