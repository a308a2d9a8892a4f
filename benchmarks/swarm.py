"""Co-located, pull and push-pull on one task: the curves of a swarm, through real processes.

    python benchmarks/swarm.py                          # five seeds of the quickstart: about half an hour
    python benchmarks/swarm.py --small                  # one seed, a few steps: minutes, to see that it works
    python benchmarks/swarm.py --task knights           # knights and knaves of reasoning-gym
    python benchmarks/swarm.py --warm-up                # the policies that the runs start from, and no more
    python benchmarks/swarm.py --summary                # what is recorded so far

Each arm and seed is a run of its own (``swarm_arms.py``): ``rollover train``, and for the swarm's arms a
``rollover worker`` for each of eight edge machines, whose engine is the embedded one held back by the clock
(``edge.py``). Runs take turns, one at a time; what is recorded in ``--out`` already is not done again, so that the
campaign can be stopped and gone on with. ``swarm_figure.py`` draws the picture of ``docs/measurements.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import knights  # noqa: E402
from edge import EdgeMachine  # noqa: E402
from engine import machine  # noqa: E402
from forked import Forks  # noqa: E402
from swarm_arms import ARMS, Task, train, warm_up  # noqa: E402
from swarm_record import evaluate, record_of  # noqa: E402
from swarm_summary import forecast, markdown, summarize  # noqa: E402

Record = dict[str, Any]


def fleet(*speeds: float, b0: float = 16.0) -> tuple[EdgeMachine, ...]:
    """Edge machines, each with so many tokens per second for a call alone; a faster one has more room too."""
    return tuple(
        EdgeMachine(
            name=f"edge{i}",
            tokens_per_s=speed,
            b0=b0,
            max_running=max(4, round(speed / 3)),
            prefill_tokens_per_s=100 * speed,
        )
        for i, speed in enumerate(speeds)
    )


QUICKSTART = Task(
    name="quickstart",
    config="quickstart",
    steps=30,
    eval_every=5,
    groups=24,
    group_size=8,
    max_new_tokens=256,
    max_staleness=3,
    machines=fleet(96, 80, 68, 56, 48, 40, 32, 24),
)
KNIGHTS = replace(
    QUICKSTART,
    name="knights",
    config=str(HERE / "knights.toml"),
    max_new_tokens=48,
    examples=("knights.jsonl", knights.write),
)
TASKS = {task.name: task for task in (QUICKSTART, KNIGHTS)}


class Results:
    """The file with all runs, written anew after each of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: Record = json.loads(path.read_text()) if path.exists() else {"tasks": {}}

    def runs(self, task: str) -> dict[tuple[str, int], Record]:
        kept = self.found["tasks"].get(task, {}).get("runs", [])
        return {(run["arm"], run["seed"]): run for run in kept}

    def add(self, task: Task, run: Record) -> None:
        entry = self.found["tasks"].setdefault(task.name, {"task": asdict(replace(task, examples=None)), "runs": []})
        entry["runs"].append(run)
        self.write()

    def summarize(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            runs = self.runs(task.name)
            entry = self.found["tasks"].get(task.name)
            if entry is None:
                continue
            entry["summary"] = summarize(runs, [arm for arm in ARMS if any(a == arm for a, _ in runs)])
            shape = {"groups": task.groups, "group_size": task.group_size, "max_new_tokens": task.max_new_tokens}
            entry["forecast"] = [
                {"seed": seed, **forecast(run, task.machines, staleness=task.max_staleness, **shape)}
                for (arm, seed), run in sorted(runs.items())
                if arm == "co-located"
            ]
        self.write()

    def write(self) -> None:
        self.found |= {"date": str(date.today()), "command": sys.argv, "machine": machine()}
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.found, indent=None, separators=(",", ":")) + "\n")
        partial.replace(self._path)


def play(task: Task, arm: str, seed: int, folder: Path, samples_per_prompt: int, forks: Forks) -> Record:
    """One run, with the accuracies of its checkpoints."""
    model = warm_up(task, seed, folder, forks)
    place = folder / "runs" / f"{task.name}-{arm}-{seed}"
    began_s, load = time.time(), os.getloadavg()[0]
    run = train(task, arm, seed, model, place, forks)
    took_s = time.time() - began_s
    rooms = {} if arm == "co-located" else {m.name: m.max_running for m in task.machines}
    found = record_of(run, rooms)
    if arm != "co-located":
        del found["lengths"]
        reports = [json.loads(file.read_text()) for file in sorted(place.glob("edge-*.json"))]
        found["machines"] = {
            key: sum(report[key] for report in reports) for key in ("iterations", "late", "slept_s", "due_s", "cpu_s")
        }
    out = place / "accuracy.json"
    forks.call(evaluate, place / "run.toml", model, run / "checkpoints", samples_per_prompt, out)
    found["evaluations"] = json.loads(out.read_text())
    return {"arm": arm, "seed": seed, "process_s": round(took_s, 1), "load_average_before": load, **found}


def told(run: Record) -> str:
    first, last = (run["evaluations"][v]["accuracy"] for v in ("0", str(len(run["steps"]))))
    text = f"seed {run['seed']}  {run['arm']:10s}  {run['wall_s']:7.1f} s  accuracy {first:.3f} to {last:.3f}"
    text += f"  staleness {run['staleness']['mean']:.2f} at most {run['staleness']['max']}"
    text += f"  trainer idle {run['idle']['trainer']:.0%}"
    if run["idle"]["members"]:
        shares = [member["machine"] for member in run["idle"]["members"].values()]
        late = run["machines"]["late"] / run["machines"]["iterations"]
        text += f", members {sum(shares) / len(shares):.0%}  iterations late {late:.1%}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="quickstart")
    parser.add_argument("--arms", default=",".join(ARMS), help="between commas (%(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="how many (%(default)s)")
    parser.add_argument("--steps", type=int, help="of training, other than the task's")
    parser.add_argument("--samples-per-prompt", type=int, default=2, help="of an evaluation (%(default)s)")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--warm-up", action="store_true", help="make the policies to start from, and end")
    parser.add_argument("--summary", action="store_true", help="run nothing")
    parser.add_argument("--folder", type=Path, default=HERE.parent / "build" / "swarm", help="of runs (%(default)s)")
    parser.add_argument("--out", type=Path, default=HERE / "results" / f"swarm-{date.today()}.json")
    args = parser.parse_args()
    task = TASKS[args.task]
    if args.small:
        task = replace(task, steps=4, eval_every=2)
        args.seeds, args.out = 1, args.folder / "small.json"
    if args.steps:
        task = replace(task, steps=args.steps)
    args.folder.mkdir(parents=True, exist_ok=True)
    args.folder = args.folder.resolve()
    results = Results(args.out)
    if not args.summary:
        with Forks() as forks:
            for seed in range(args.seeds):
                if args.warm_up:
                    print(warm_up(task, seed, args.folder, forks), flush=True)
                    continue
                for arm in args.arms.split(","):
                    if (arm, seed) in results.runs(task.name):
                        continue
                    run = play(task, arm, seed, args.folder, args.samples_per_prompt, forks)
                    results.add(task, run)
                    print(told(run), flush=True)
    if args.warm_up:
        return
    results.summarize([task])
    entry = results.found["tasks"][task.name]
    if not entry["summary"]:
        print("no seed has been through all arms yet")
        return
    print(markdown(entry["summary"]))
    for key in ("paired", "pull_over_push_pull", "equal_batches", "equal_weights"):
        print(key, json.dumps(entry["summary"].get(key)))
    print("forecast", json.dumps(entry["forecast"]))


if __name__ == "__main__":
    main()
