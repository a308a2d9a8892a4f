"""`rollover` against `april` at the same lag, counted over tokens and over batches (simulated).

    python benchmarks/equal_lag.py --out benchmarks/results/equal-lag-DATE.json      # five seeds: about ten minutes

Both train whole groups, keep caches across weight updates and have one engine: N = 32, G = 8, B0 = 256. `april` starts
with twice a batch. `rollover` is run with every lag target of a grid; of its runs that are no older than `april`'s run
of the same seed, the fastest is compared. Age is the mean lag of trained tokens, or the mean over batches of their mean
lag, which is what an optimizer sees that makes one update of each batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollover.frontier.sweep import MeanOverSeeds
from rollover.rollout.config import RolloutConfig
from rollover.sim.run import simulate
from rollover.sim.scenario import ReplicaModel, Scenario
from rollover.sim.strategies import SimulatedRollout
from rollover.workload.source import PRESETS

TARGETS = tuple(float(t) for t in np.geomspace(0.05, 6.0, 25).round(3))
STEPS, WARMUP = 120, 24
SCENARIO = Scenario(replicas=(ReplicaModel(c0_s=1.0, b0=256.0, prefill_tokens_per_s=1600.0),), kv_on_update="keep")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one simulation without its warm-up."""

    tokens_per_s: float
    token_lag: float
    batch_lag: float


def run(strategy: str, preset: str, seed: int, **options: object) -> Outcome:
    law = PRESETS[preset]
    config: RolloutConfig = SimulatedRollout.of(
        strategy,
        rollout_batch_size=32,
        group_size=8,
        max_new_tokens=law.cap_tokens,
        max_staleness=60,
        **options,
    )
    strategy_of_run = config.build_strategy(SCENARIO.capabilities)
    window = simulate(strategy_of_run, law.workload(seed), SCENARIO, steps=STEPS, seed=seed).after(WARMUP)
    batches = [np.average([lag for lag, _ in s.lags], weights=[n for _, n in s.lags]) for s in window.steps]
    return Outcome(window.tokens_per_s, window.lag.mean, float(np.mean(batches)))


def ratio(april: Outcome, ours: list[Outcome], lag: str) -> float | None:
    """Return the throughput of ``rollover`` over ``april``'s, or None if each of its runs is older."""
    younger = [o for o in ours if getattr(o, lag) <= getattr(april, lag)]
    return max(o.tokens_per_s for o in younger) / april.tokens_per_s if younger else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="r1-16k,qwen3-16k,heavy-32k,light-8k")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for preset in options.presets.split(","):
        aprils = [run("april", preset, seed, over_sampling_batch_size=64) for seed in range(options.seeds)]
        ours = [[run("rollover", preset, seed, lag_target=t) for t in TARGETS] for seed in range(options.seeds)]
        ratios = {
            lag: [r for a, o in zip(aprils, ours, strict=True) if (r := ratio(a, o, lag)) is not None]
            for lag in ("token_lag", "batch_lag")
        }
        found[preset] = {
            "april": [asdict(a) for a in aprils],
            "rollover": [dict(zip(TARGETS, map(asdict, o), strict=True)) for o in ours],
            "ratio": {lag: asdict(MeanOverSeeds.of(values)) for lag, values in ratios.items()},
        }
        lags = {lag: statistics.fmean(getattr(a, lag) for a in aprils) for lag in ratios}
        shown = {lag: f"{r['mean']:.2f} at {lags[lag]:.2f}" for lag, r in found[preset]["ratio"].items()}
        print(preset, shown, flush=True)
        settings = {"N": 32, "G": 8, "B0": 256, "april": "r = 2", "steps": STEPS, "warmup": WARMUP}
        record = {"command": f"benchmarks/equal_lag.py --seeds {options.seeds}", "settings": settings, "presets": found}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
