"""How long the planner takes: fleets of 16 to 4,096 devices, one to four types, at several bounds.

    python benchmarks/planner.py --out benchmarks/results/planner.json

Prints a line for each fleet and bound: time to list the choices of phase 1 and to solve it (all passes, one thread),
on the clock and of a core, the proved gap, and the time of a core for a whole plan
(both phases, all rounds and parts of the fleet, with the defaults of ``rollover plan``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import scipy

from rollover.devices import model_shape as model
from rollover.devices.records import WorkloadSpec
from rollover.devices.workload import length_buckets
from rollover.planner import choices, fleet
from rollover.planner.optimum import solve
from rollover.planner.problem import PlanSpec, fleet_problem
from rollover.planner.search import make_plan
from rollover.settings import toml

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.planner.verification import violations

QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
TYPES = ("h100-sxm", "l40s", "a100-80-sxm", "l4")
FLEETS = ((16, 1, 2.0), (16, 2, 2.0), (64, 2, 2.0), (64, 4, 2.0), (1024, 4, 30.0), (4096, 4, 120.0))
"""Devices, types, seconds that planning may take."""
BOUNDS = (0, 1, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One fleet at one bound."""

    devices: int
    types: int
    max_staleness: int
    replica_kinds: int
    plans: int
    list_s: float
    solve_s: float
    cpu_s: float
    gap: float
    steps_per_h: float
    limit_s: float
    plan_cpu_s: float
    planned_steps_per_h: float


def fleet_of(devices: int, types: int) -> fleet.Fleet:
    """Equal numbers of each type in nodes of eight (or of what there is)."""
    each = devices // types
    size = min(8, each)
    nodes = "".join(
        f'[[nodes]]\ndevice = "{name}"\nnum_devices = {size}\ncount = {each // size}\n' for name in TYPES[:types]
    )
    return fleet.parse(toml.parse(f"[network]\ngbit_s = 400\n{nodes}", "fleet.toml"))


def workload(devices: int) -> WorkloadSpec:
    """Long-tailed lengths, cut at 16k; prompts per step grow with the fleet."""
    sample = np.minimum(np.random.default_rng(0).lognormal(7.7, 1.0, 20_000).astype(int) + 1, 16_384)
    groups = max(32, devices)
    buckets = length_buckets(sample, group_size=8, num_groups=groups)
    return WorkloadSpec(name="long-tailed", num_groups=groups, group_size=8, prompt_tokens=200, buckets=buckets)


def measure(devices: int, types: int, max_staleness: int, limit_s: float) -> Timing:
    shape = model.parse(QWEN_7B, name="Qwen2.5-7B")
    here = fleet_of(devices, types)
    forget()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    spec = PlanSpec(model=shape, workload=workload(devices), max_staleness=max_staleness)
    problem = fleet_problem(here, replace(spec, tail="none"))
    listed_s = time.perf_counter()
    solution = solve(problem)
    assert solution is not None
    assert not violations(problem, solution)
    solved_s, solved_cpu_s = time.perf_counter(), time.process_time()
    forget()
    planned = make_plan(here, spec)
    return Timing(
        devices=devices,
        types=types,
        max_staleness=max_staleness,
        replica_kinds=len(problem.replica_kinds),
        plans=len(problem.plans),
        list_s=round(listed_s - start_s, 3),
        solve_s=round(solved_s - listed_s, 3),
        cpu_s=round(solved_cpu_s - start_cpu_s, 3),
        gap=round(solution.gap, 6),
        steps_per_h=round(solution.steps_per_s * 3600, 3),
        limit_s=limit_s,
        plan_cpu_s=round(time.process_time() - solved_cpu_s, 3),
        planned_steps_per_h=round(planned.solution.steps_per_s * 3600, 3),
    )


def forget() -> None:
    """Have the choices of device types listed again, as in a new process."""
    choices._fastest_trainers.cache_clear()
    choices.undominated_kinds.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures here")
    parser.add_argument("--largest", type=int, default=4096, help="devices of the largest fleet")
    options = parser.parse_args()
    timings = []
    for devices, types, limit_s in FLEETS:
        for bound in BOUNDS:
            if devices <= options.largest:
                timings.append(measure(devices, types, bound, limit_s))
                t = timings[-1]
                took_s = t.list_s + t.solve_s
                print(
                    f"{devices:5} devices, {types} types, bound {bound}: {t.replica_kinds:4} kinds, {t.plans:4} plans, "
                    f"{took_s:6.2f} s of {limit_s:g} ({t.cpu_s:.2f} s of a core), gap {t.gap:.1e}, "
                    f"{t.steps_per_h:.2f} steps/h; a plan of {t.planned_steps_per_h:.2f} steps/h in"
                    f" {t.plan_cpu_s:.1f} s",
                    flush=True,
                )
    if options.out:
        machine = {"python": platform.python_version(), "scipy": scipy.__version__, "cpu": processor()}
        machine["processes_at_work"] = f"{os.getloadavg()[1]:.1f}"  # beyond the cores, they stretch list_s and solve_s
        options.out.write_text(json.dumps({"machine": machine, "timings": list(map(asdict, timings))}, indent=1) + "\n")


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


if __name__ == "__main__":
    main()
