"""How fast the simulator is: events per second of one core, and a run the size of 1,024 GPUs against its limits.

    OMP_NUM_THREADS=1 python benchmarks/simulator.py            # about four minutes on a quiet machine
    OMP_NUM_THREADS=1 python benchmarks/simulator.py --quick    # 5 steps of the large run, half a minute

An event is one of the ledger: a sample starts, hands over a segment, is scored; a group is opened; a batch is taken.
Small settings are 32 groups of 8 on one replica, best of three. The large run has 128 replicas of 8 devices and 100,000
samples in flight that run on while weights change, so that each step ends a segment of every one of them. Times are of
the CPU; the large run's wall time is beside its own. Exits with 1 where a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import date
from itertools import count
from pathlib import Path
from typing import Any

from rollover.rollout.events import Event
from rollover.sim.result import Simulation
from rollover.sim.run import simulate
from rollover.sim.scenario import ReplicaModel, Scenario
from rollover.sim.strategies import SimulatedRollout
from rollover.workload.law import Generator
from rollover.workload.source import PRESETS

LAW = PRESETS["r1-16k"]
SMALL: dict[str, dict[str, Any]] = {
    "sync": {},
    "april": {"over_sampling_batch_size": 64, "max_staleness": 60},
    "inflight": {"num_running": 512, "max_staleness": 60},
}
SMALL_STEPS, REPEATS = 200, 3
REPLICAS, DEVICES_PER_REPLICA, IN_FLIGHT = 128, 8, 100_000
LARGE_STEPS, QUICK_STEPS, WARMUP = 100, 5, 2
LEAST_EVENTS_PER_S, MOST_WALL_S, MOST_GIB = 100_000, 180.0, 4.0
FULL_STEPS = 0.95
"""Share of steps in which so many are in flight, to a hundredth."""


def timed(strategy: str, scenario: Scenario, *, steps: int, **config: Any) -> tuple[Simulation, dict[str, Any]]:
    """Simulate, and what that took."""
    rollout = SimulatedRollout.of(strategy, max_new_tokens=LAW.cap_tokens, **config)
    made = rollout.build_strategy(scenario.capabilities)
    num_events = count()

    def observe(event: Event) -> None:
        next(num_events)

    wall_s, cpu_s = time.perf_counter(), time.process_time()
    simulation = simulate(made, Generator(LAW), scenario, steps=steps, observer=observe)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    events = next(num_events)
    return simulation, {"events": events, "cpu_s": cpu_s, "wall_s": wall_s, "events_per_s": events / cpu_s}


def small() -> Iterator[dict[str, Any]]:
    model = ReplicaModel(c0_s=1.0, b0=256.0, prefill_tokens_per_s=1600.0)
    scenario = Scenario(replicas=(model,), kv_on_update="keep")
    for name, config in SMALL.items():
        runs = [
            timed(name, scenario, steps=SMALL_STEPS, rollout_batch_size=32, group_size=8, **config)[1]
            for _ in range(REPEATS)
        ]
        yield {"strategy": name, "steps": SMALL_STEPS} | max(runs, key=lambda run: run["events_per_s"])


def large(steps: int) -> dict[str, Any]:
    model = ReplicaModel(c0_s=0.02, b0=120.0, prefill_tokens_per_s=30_000.0, max_running=1000)
    simulation, took = timed(
        "bounded_async",
        Scenario(replicas=(model,) * REPLICAS, kv_on_update="keep"),
        steps=steps,
        rollout_batch_size=1024,
        group_size=16,
        max_staleness=60,
        num_running=IN_FLIGHT,
    )
    window = simulation.after(WARMUP)
    full = statistics.fmean(step.mean_running >= 0.99 * IN_FLIGHT for step in window.steps)
    return took | {
        "strategy": "bounded_async",
        "devices": REPLICAS * DEVICES_PER_REPLICA,
        "steps": steps,
        "mean_in_flight": window.mean_running,
        "share_of_full_steps": full,
        "lag": window.lag.batch,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,  # Linux counts in KiB
    }


def missed(found: list[dict[str, Any]], run: dict[str, Any]) -> list[str]:
    """Limits that were, in words. Those of time hold for a whole run only."""
    broken = [
        f"{what['strategy']}: {what['events_per_s']:,.0f} events/s, at least {LEAST_EVENTS_PER_S:,} wanted"
        for what in (*found, run)
        if what["events_per_s"] < LEAST_EVENTS_PER_S
    ]
    if run["wall_s"] > MOST_WALL_S:
        broken.append(f"{run['wall_s']:.0f} s for the large run, at most {MOST_WALL_S:.0f} wanted")
    if run["peak_gib"] > MOST_GIB:
        broken.append(f"{run['peak_gib']:.1f} GiB, at most {MOST_GIB:.1f} wanted")
    if run["share_of_full_steps"] < FULL_STEPS:
        broken.append(f"{IN_FLIGHT:,} samples in flight in {run['share_of_full_steps']:.0%} of the steps only")
    return broken


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps of the large run")
    parser.add_argument("--out", type=Path, help="where to record the figures")
    args = parser.parse_args()
    record: dict[str, Any] = {
        "date": str(date.today()),
        "machine": processor(),
        "python": platform.python_version(),
        "quick": args.quick,
        "small": [],
    }
    for found in small():
        record["small"].append(found)
        print(f"{found['strategy']:14s} {found['events']:10,} events  {found['events_per_s']:8,.0f}/s", flush=True)
    run = record["large"] = large(QUICK_STEPS if args.quick else LARGE_STEPS)
    print(
        f"{run['strategy']:14s} {run['events']:10,} events  {run['events_per_s']:8,.0f}/s  {run['devices']:,} devices,"
        f" {run['steps']} steps: {run['wall_s']:.0f} s ({run['cpu_s']:.0f} s CPU), {run['peak_gib']:.2f} GiB,"
        f" {run['mean_in_flight']:,.0f} samples in flight, lag {run['lag']:.1f}"
    )
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"recorded in {args.out}")
    broken = missed(record["small"], run)
    for line in broken:
        print(f"missed: {line}")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
