"""What an experiment learns: accuracy by step, over seeds, for each of its variants.

    python benchmarks/learning.py quickstart --seeds 4 --out benchmarks/results/learning-quickstart-DATE.json
    python benchmarks/learning.py compare --seeds 3 --out ...             # sync, april, rollover from one warm-up
    python benchmarks/learning.py samples --seeds 3 --out ...             # whole groups against single samples
    python benchmarks/learning.py quickstart --out ... --settings "--trainer.lora.rank 16"

Runs `rollover train EXPERIMENT --seed S` for each seed and reads the metrics of the runs. Differences between variants
are paired by seed. The seconds mean something on an idle machine only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from itertools import accumulate
from pathlib import Path
from typing import Any

from engine import machine

from rollover.frontier.sweep import MeanOverSeeds


def figures(metrics: Path) -> dict[str, Any]:
    """Return, by step of an evaluation, the accuracy, and the tokens decoded and the seconds of steps until then."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    evals = [row for row in rows if row["kind"] == "eval"]
    steps = {row["step"]: row for row in rows if row["kind"] == "step"}
    seconds = dict(zip(steps, accumulate(row["time/step_s"] for row in steps.values()), strict=True))
    return {
        "accuracy": {str(row["step"]): row["accuracy"] for row in evals},
        "standard_error": {str(row["step"]): row["accuracy_se"] for row in evals},
        "decoded_tokens": {str(s): steps[s - 1]["rollout/decoded_tokens"] for row in evals if (s := row["step"])},
        "step_seconds": {str(s): seconds[s - 1] for row in evals if (s := row["step"])},
        "seconds": max(row["time_s"] for row in rows),
    }


def trained(experiment: str, seed: int, settings: list[str], threads: int) -> dict[str, dict[str, Any]]:
    """Train an experiment with one seed; return the figures of its variants by name."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = ["train", experiment, "--seed", str(seed), "--run_dir", str(run), *settings]
        subprocess.run(
            [sys.executable, "-m", "rollover", *command],
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )
        found = {
            "all" if path.parent == run else path.parent.name: figures(path) for path in run.rglob("metrics.jsonl")
        }
    return {name: run for name, run in found.items() if run["accuracy"]}  # the warm-up that variants share has none


def summary(seeds: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the accuracy at the end and the gain of each variant: means over seeds with their 95 % intervals."""

    def of(values: list[float]) -> list[float | None]:
        mean = MeanOverSeeds.of(values)
        return [mean.mean, mean.margin]

    found: dict[str, dict[str, Any]] = {}
    for name in sorted(seeds[0]):
        curves = [list(seed[name]["accuracy"].values()) for seed in seeds]
        gains = [curve[-1] - curve[0] for curve in curves]
        found[name] = {
            "before": of([curve[0] for curve in curves]),
            "after": of([curve[-1] for curve in curves]),
            "gain": of(gains),
            "least_gain": min(gains),
            "most_gain": max(gains),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", help="a packaged experiment or a TOML file")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", default="", help="settings of every run, separated by spaces")
    options = parser.parse_args()
    record: dict[str, Any] = {"command": sys.argv, "date": str(date.today()), "machine": machine(), "seeds": []}
    if options.out.is_file():  # it was broken off
        record = json.loads(options.out.read_text())
    for seed in range(len(record["seeds"]), options.seeds):
        record["seeds"].append(trained(options.experiment, seed, options.settings.split(), options.threads))
        record["summary"] = summary(record["seeds"])
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        print(seed, json.dumps(record["summary"]), flush=True)


if __name__ == "__main__":
    main()
