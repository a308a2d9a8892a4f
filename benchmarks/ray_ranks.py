"""What Ray costs a sharded trainer: the time of a step, a publication and a checkpoint that its ranks do not need.

    python benchmarks/ray_ranks.py --out benchmarks/results/ray-ranks-DATE.json    # two minutes on two idle cores
    python benchmarks/ray_ranks.py --small                                         # to see that it works

The same steps of GRPO by two ranks (gloo) that are processes of this machine, and by two on the nodes of a Ray cluster
that is made for it on this machine. *Outside* is the time of a step as the process of the run sees it, less what rank 0
says that it took: handing out the batch, Ray and messages. *Start* is from nothing to ranks that have loaded the model.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])
os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"})

from engine import machine  # noqa: E402
from scale import LOADS, Load  # noqa: E402

from rollover.cluster.config import ClusterConfig  # noqa: E402
from rollover.cluster.ranks import RayLauncher  # noqa: E402
from rollover.trainer.config import TrainerConfig  # noqa: E402


def ray_share(load: Load, num_steps: int) -> dict[str, Any]:
    """Return what two ranks took, by the way they are started: seconds, and the share of a step outside of them."""
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 400 * 2**20, "include_dashboard": False}
    with tempfile.TemporaryDirectory() as folder:
        model = load.save_model(Path(folder) / "model")
        found = {"processes of this machine": measured(load, model, None, num_steps)}
        cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 0})
        try:
            for _ in range(2):
                cluster.add_node(**node, resources={"rank": 1})
            where = ClusterConfig(address=cluster.address, trainer_resources={"rank": 1})
            config = on_two(load)
            launcher = RayLauncher(where, config, timeout_s=config.rank_timeout_s, notify=print)
            found["ranks on a Ray cluster"] = measured(load, model, launcher, num_steps)
        finally:
            import ray

            ray.shutdown()
            cluster.shutdown()
    return {"batch_bytes": len(pickle.dumps(load.batch(0), protocol=pickle.HIGHEST_PROTOCOL)), "ways": found}


def on_two(load: Load) -> TrainerConfig:
    return replace(load.config, num_devices=2)


def measured(load: Load, model: Path, launcher: RayLauncher | None, num_steps: int) -> dict[str, Any]:
    """Train some steps, publish and save with two ranks; return what each took, in seconds."""
    from rollover.algorithms import AlgorithmConfig, resolve
    from rollover.trainer.fleet import FleetTrainer

    started_s = time.perf_counter()
    trainer = FleetTrainer(
        on_two(load),
        resolve(AlgorithmConfig()),
        model,
        temperature=1.0,
        max_response_tokens=load.response,
        num_steps=1000,
        fallback=model.parent / "staging",
        logs=model.parent / "logs",
        launcher=launcher,
    )
    try:
        start_s = time.perf_counter() - started_s
        trainer.step(load.batch(0))  # makes the moments
        steps, own = [], []
        for step in range(1, num_steps + 1):
            given, began_s = load.batch(step), time.perf_counter()
            own.append(trainer.step(given).metrics["time/step_s"])
            steps.append(time.perf_counter() - began_s)
        outside = [step - inside for step, inside in zip(steps, own, strict=True)]
        publication_s = timed(trainer.weight_source)
        checkpoint_s = timed(lambda: trainer.save(model.parent / "checkpoints" / f"step_{trainer.version}"))
    finally:
        trainer.close()
    result = {
        "start_s": round(start_s, 2),
        "step_s": round(statistics.median(steps), 4),
        "outside_s": round(statistics.median(outside), 4),
        "outside_share": round(statistics.median(outside) / statistics.median(steps), 4),
        "publication_s": round(publication_s, 3),
        "checkpoint_s": round(checkpoint_s, 3),
    }
    print(result, flush=True)
    return result


def timed(work: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="a tiny model and one step")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    load = LOADS["small" if args.small else "whole"]
    result = {"machine": machine(), "load": asdict(load), **ray_share(load, 1 if args.small else args.steps)}
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
