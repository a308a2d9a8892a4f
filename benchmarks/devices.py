"""Whether the trainer learns the same on one device, sharded over two, and over two on a Ray cluster: the quickstart.

    python benchmarks/devices.py --out benchmarks/results/devices-DATE.json    # four minutes on two idle cores
    python benchmarks/devices.py --small                                       # to see that it works

One warm-up, then the same 60 steps of the quickstart from its model, three times: ``deterministic``, with one seed, one
thread for each rank, and the Ray cluster on this machine. Accuracy is that of the run's own evaluations. Batches are
compared token by token, and the weights of checkpoints, of which there is one every three steps: rounding depends on
the number of ranks, so at some step a token is drawn otherwise, and from then on two runs train on different batches.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])
os.environ.update({"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"})

from engine import machine  # noqa: E402
from swarm_arms import without_sections  # noqa: E402

from rollover.report.metrics import read_metrics  # noqa: E402
from rollover.run.building import find  # noqa: E402

TWO = ("--trainer.num_devices", "2")
WAYS = {"1 device": (), "2 devices": TWO, "2 devices on a Ray cluster": TWO}
EVERY = 3
"""Steps between two checkpoints."""


def write_config(file: Path, model: Path, options: argparse.Namespace) -> None:
    """The quickstart from a warmed-up model on."""
    text = without_sections(find("quickstart").read_text(), "model.scratch", "sft").replace("steps = 60", "", 1)
    file.write_text(
        f"seed = {options.seed}\nsteps = {options.steps}\ndeterministic = true\n{text}\n"
        f'[model]\npath = "{model}"\n[checkpoint]\nevery_steps = {EVERY}\nkeep_last = 1000\n'
        '[logging]\nprogress = "off"\ntensorboard = false\n'
    )


def command(*argv: object) -> None:
    done = subprocess.run([sys.executable, "-m", "rollover", *map(str, argv)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"rollover {' '.join(map(str, argv))} ended with {done.returncode}: {done.stderr}")


class LocalCluster(AbstractContextManager[tuple[str, ...]]):
    """A Ray cluster on this machine with a node for each of two ranks; what is entered are a run's arguments."""

    def __enter__(self) -> tuple[str, ...]:
        from ray.cluster_utils import Cluster

        node: dict[str, Any] = {"object_store_memory": 200 * 2**20, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 0})
        for _ in range(2):
            self._cluster.add_node(**node, num_cpus=2, resources={"rank": 1})
        return ("--cluster.address", self._cluster.address, "--cluster.trainer_resources.rank", "1")

    def __exit__(self, *_: object) -> None:
        self._cluster.shutdown()


def measured(run: Path) -> dict[str, Any]:
    """Return what a run says of itself."""
    rows = read_metrics(run)
    steps = [row for row in rows if row.kind == "step"]
    return {
        "steps_s": round(sum(row.values["time/step_s"] for row in steps), 2),
        "train_s": round(sum(row.values["time/train_s"] for row in steps), 2),
        "reward_of_last_10": round(sum(row.values["reward/mean"] for row in steps[-10:]) / len(steps[-10:]), 4),
        "accuracy": {
            row.step: [row.values["accuracy"], row.values["accuracy_se"]] for row in rows if row.kind == "eval"
        },
    }


def compared(ours: Path, theirs: Path, last: int) -> dict[str, Any]:
    """Return how far the weights of two runs are apart, and the first step whose batches are not the same."""
    from tests.runs import batches

    def sampled(run: Path) -> list[Any]:
        return [[(t.sample_id, t.token_ids, t.reward) for t in batch.trajectories] for batch in batches(run)]

    pairs = zip(sampled(ours), sampled(theirs), strict=True)
    other = next((step for step, (one, two) in enumerate(pairs) if one != two), None)
    return {
        "first_step_with_another_batch": other,
        "largest_distance_of_weights": {step: distance(ours, theirs, step) for step in (EVERY, last)},
    }


def distance(ours: Path, theirs: Path, step: int) -> float:
    one, other = (weights(run, step) for run in (ours, theirs))
    assert one.keys() == other.keys()
    return max(float((tensor - other[name]).abs().max()) for name, tensor in one.items())


def weights(run: Path, step: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    files = (run / "checkpoints" / f"step_{step}").glob("*.safetensors")
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def train_all(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    sft: Sequence[str] = ("--sft.num_steps", "20") if options.small else ()
    command("sft", "quickstart", "--seed", options.seed, "--run-dir", folder / "warm-up", *sft)
    file = folder / "run.toml"
    write_config(file, folder / "warm-up" / "model", options)
    found, runs = {}, {way: folder / f"run-{number}" for number, way in enumerate(WAYS)}
    for way, argv in WAYS.items():
        where: AbstractContextManager[tuple[str, ...]] = LocalCluster() if "Ray" in way else nullcontext(())
        with where as more:
            command("train", file, "--run-dir", runs[way], "--trainer.device", "cpu", *argv, *more)
        found[way] = measured(runs[way])
        if way != "1 device":
            found[way]["to 1 device"] = compared(runs[way], runs["1 device"], options.steps)
        if "Ray" in way:
            found[way]["to 2 devices"] = compared(runs[way], runs["2 devices"], options.steps)
        print(f"{way}: {found[way]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help=f"a multiple of {EVERY} (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="a short warm-up and three steps")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.steps = EVERY if options.small else options.steps
    with tempfile.TemporaryDirectory() as folder:
        ways = train_all(Path(folder), options)
    if options.out is not None:
        recorded = {"date": str(date.today()), "machine": machine(), "seed": options.seed, "steps": options.steps}
        options.out.write_text(json.dumps({**recorded, "ways": ways}, indent=1) + "\n")


if __name__ == "__main__":
    main()
