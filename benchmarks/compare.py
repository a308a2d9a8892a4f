"""Three schedules side by side, in ten minutes on two cores: how fast they roll out, and how well they learn.

    OMP_NUM_THREADS=2 python benchmarks/compare.py            # `make compare`; on a quiet machine
    OMP_NUM_THREADS=2 python benchmarks/compare.py --small    # to see that it works

The quickstart's model is so small that ten samples take ten times as long as one, so that schedules tie. Speed is
therefore measured with a model of 28 M parameters, which replays recorded response lengths (`benchmarks/rollout.py`,
settings as packaged, six prompts a batch whatever the machine is like at its start). Accuracy is that of `rollover
train compare`: the quickstart's task from one warm-up, per step.
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path
from typing import Any

from drawing import figure
from learning import trained
from rollout import measured_and_foretold
from rollout import options as rollout_options

BUILD = Path("build")
PACKAGED = {"sync": "sync", "april": "april, as packaged", "rollover": "rollover, as packaged"}
COLOURS = {"sync": "#778", "april": "#c33", "rollover": "#27a"}


def measure(small: bool, seed: int) -> dict[str, Any]:
    settings = [
        "--batch",
        "6",
        "--steps",
        "24",
        "--repeats",
        "2",
        "--only",
        "; ".join(PACKAGED.values()),
        *(["--small"] if small else []),
    ]
    return {
        "date": str(date.today()),
        "rollout": measured_and_foretold(rollout_options().parse_args(settings)),
        "learning": trained("compare", seed, ["--steps", "4"] if small else [], threads=2),
    }


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw speed, and beside it accuracy."""
    with figure(path, columns=2, height=3.4) as (speeds, curves):
        _draw(record, speeds, curves)


def _draw(record: dict[str, Any], speeds: Any, curves: Any) -> None:
    summary = record["rollout"]["summary"]
    for place, (strategy, name) in enumerate(PACKAGED.items()):
        found, run = summary[name], record["learning"][strategy]
        rate, gain, lag = found["mean"]["tokens_per_s"], found["gain"], found["mean"]["lag"]
        speeds.bar(place, rate, color=COLOURS[strategy], width=0.6)
        speeds.annotate(f"{gain:.2f}×\nlag {lag:.2f}", (place, rate), ha="center", va="bottom")
        steps = [int(step) for step in run["accuracy"]]
        accuracies = list(run["accuracy"].values())
        errors = list(run["standard_error"].values())
        shown = {"color": COLOURS[strategy], "label": strategy, "lw": 1.5, "marker": "o", "ms": 4}
        curves.errorbar(steps, accuracies, yerr=errors, capsize=2, elinewidth=0.8, **shown)
    speeds.set(xticks=range(len(PACKAGED)), xticklabels=PACKAGED, ylabel="trained tokens/s of rollout")
    speeds.margins(y=0.25)
    curves.set(xlabel="training steps", ylabel="accuracy on held-out problems")
    curves.legend(frameon=False, loc="lower right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny loads: whether it works")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=BUILD / "compare.json")
    parser.add_argument("--image", type=Path, default=BUILD / "compare.svg")
    args = parser.parse_args()
    record = measure(args.small, args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    draw(record, args.image)
    for strategy, name in PACKAGED.items():
        found, accuracy = record["rollout"]["summary"][name], record["learning"][strategy]["accuracy"]
        first, *_, last = accuracy.values()
        print(
            f"{strategy:9s} {found['mean']['tokens_per_s']:6,.0f} trained tokens/s, {found['gain']:.2f} times sync"
            f" ({found['foretold']['table']:.2f} predicted), lag {found['mean']['lag']:.2f};"
            f" accuracy {first:.3f} -> {last:.3f}"
        )
    print(f"recorded in {args.out}, drawn in {args.image}")


if __name__ == "__main__":
    main()
