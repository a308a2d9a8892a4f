"""What it is worth to ``rollover`` to know how fast its engine prefills, and how well it must know: gains over sync
where weight updates lose the caches, by what the engine prefills in the time of an iteration and by what it is told.

    python benchmarks/prefill.py            # some minutes, in virtual time

The baseline is ``rollover`` that does not weigh prefill at all (``inf``), as it was before.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from rollover.frontier.sweep import Length, MeanOverSeeds, Runner, Trial, TrialResult, run_trials, workers
from rollover.sim.scenario import ReplicaModel, Scenario
from rollover.sim.strategies import SimulatedRollout
from rollover.workload.source import PRESETS

HERE = Path(__file__).parent
B0 = 256.0
ENGINES = (17.0, 150.0, 1600.0)
"""Tokens prefilled in the time of an iteration: measured on a CPU, a GPU by its roofline, ``map.py``."""
TOLD = (17.0, 50.0, 150.0, 500.0, 1600.0, math.inf)


def study(preset: str, lag: float, unit: Any, num_seeds: int, length: Length, runner: Runner) -> dict[str, Any]:
    """Gains by engine and by what is told."""
    law = PRESETS[preset]
    shape = {"rollout_batch_size": 32, "group_size": 8, "max_new_tokens": law.cap_tokens}
    ours = shape | {"unit": unit, "lag_target": lag, "max_staleness": 60}
    told = [SimulatedRollout.of("rollover", **ours, prefill_tokens_per_iteration=rate) for rate in TOLD]
    settings = [SimulatedRollout.of("sync", **shape), *told]
    rows = []
    for rate in ENGINES:
        place = Scenario(replicas=(ReplicaModel(c0_s=1.0, b0=B0, prefill_tokens_per_s=rate),))
        trials = [Trial(config=c, seed=s, lengths=law, scenario=place) for c in settings for s in range(num_seeds)]
        found = run_trials(trials, length, runner)
        sync, *each = [found[i * num_seeds : (i + 1) * num_seeds] for i in range(len(settings))]
        unweighed = each[-1]
        rows.append(
            {
                "engine": rate,
                "told": [
                    {
                        "told": f"{belief:g}",
                        "gain": asdict(over(runs, sync)),
                        "over_unweighed": asdict(over(runs, unweighed)),
                        "lag": statistics.fmean(o.lags.batch for o in runs),
                        "prefilled": statistics.fmean(o.prefilled for o in runs),
                    }
                    for belief, runs in zip(TOLD, each, strict=True)
                ],
            }
        )
    return {"preset": preset, "lag_target": lag, "unit": unit, "engines": rows}


def over(runs: list[TrialResult], baseline: list[TrialResult]) -> MeanOverSeeds:
    return MeanOverSeeds.of([a.tokens_per_s / b.tokens_per_s for a, b in zip(runs, baseline, strict=True)])


def show(found: dict[str, Any]) -> None:
    print(
        f"\n{found['preset']}, {found['unit']}s, lag target {found['lag_target']:g}: gain over sync (over not weighed)"
    )
    print(f"{'engine / told':>14s}" + "".join(f"{belief:>14g}" for belief in TOLD))
    for row in found["engines"]:
        cells = [f"{t['gain']['mean']:.2f} ({t['over_unweighed']['mean']:.2f})" for t in row["told"]]
        print(f"{row['engine']:>14g}" + "".join(f"{cell:>14s}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--lags", default="1,2")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=HERE / "results" / f"prefill-{date.today()}.json")
    args = parser.parse_args()
    record: dict[str, Any] = {
        "settings": vars(args) | {"out": args.out.name, "B0": B0},
        "python": platform.python_version(),
        "studies": [],
    }
    with workers(args.jobs) as runner:
        for preset in args.presets.split(","):
            for unit in ("group", "sample"):
                for lag in map(float, args.lags.split(",")):
                    length = Length(steps=args.steps, warmup=args.warmup)
                    record["studies"].append(study(preset, lag, unit, args.seeds, length, runner))
                    show(record["studies"][-1])
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nrecorded in {args.out}")


if __name__ == "__main__":
    main()
