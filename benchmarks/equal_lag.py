"""`rollover` against `april` at the same lag (simulated).

    python benchmarks/equal_lag.py --out benchmarks/results/equal-lag-DATE.json      # five seeds: some minutes

Both train whole groups, keep caches across weight updates and have one engine: N = 32, G = 8, B0 = 256. `april` starts
rounds with 1.5, 2 and 3 batches; `rollover` is told the batch lag that `april` had with the same seed: the mean over
batches, each of which is one update, of the mean lag of their tokens. ``--gains`` tells what it gains over `sync` at
some lags instead, with whole groups and with single samples.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollover.frontier.sweep import MeanOverSeeds
from rollover.rollout.config import RolloutConfig
from rollover.sim.run import simulate
from rollover.sim.scenario import ReplicaModel, Scenario
from rollover.sim.strategies import SimulatedRollout
from rollover.workload.source import PRESETS

RATIOS = (1.5, 2.0, 3.0)
TARGETS = (0.25, 0.5, 1.0, 2.0)
STEPS, WARMUP = 120, 24
SCENARIO = Scenario(replicas=(ReplicaModel(c0_s=1.0, b0=256.0, prefill_tokens_per_s=1600.0),), kv_on_update="keep")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one simulation without its warm-up."""

    tokens_per_s: float
    token_lag: float
    batch_lag: float
    spread: float
    """Standard deviation of the tokens of a batch, over their mean."""


def run(strategy: str, preset: str, seed: int, **options: Any) -> Outcome:
    law = PRESETS[preset]
    config: RolloutConfig = SimulatedRollout.of(
        strategy,
        **{
            "rollout_batch_size": 32,
            "group_size": 8,
            "max_new_tokens": law.cap_tokens,
            "max_staleness": None if strategy == "sync" else 60,
        }
        | options,
    )
    strategy_of_run = config.build_strategy(SCENARIO.capabilities)
    window = simulate(strategy_of_run, law.workload(seed), SCENARIO, steps=STEPS, seed=seed).after(WARMUP)
    tokens = [sum(step.lengths) for step in window.steps]
    spread = statistics.pstdev(tokens) / statistics.fmean(tokens)
    return Outcome(window.tokens_per_s, window.lag.token, window.lag.batch, spread)


def compare(preset: str, ratio: float, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the runs of both strategies by seed, and what ``rollover`` trains for each token of ``april``."""
    aprils = [run("april", preset, seed, over_sampling_batch_size=int(32 * ratio)) for seed in seeds]
    ours = [run("rollover", preset, seed, lag_target=a.batch_lag) for seed, a in zip(seeds, aprils, strict=True)]
    ratios = [o.tokens_per_s / a.tokens_per_s for o, a in zip(ours, aprils, strict=True)]
    return {
        "april": [asdict(a) for a in aprils],
        "rollover": [asdict(o) for o in ours],
        "ratio": asdict(MeanOverSeeds.of(ratios)),
        "lag": {
            "april": statistics.fmean(a.batch_lag for a in aprils),
            "rollover": statistics.fmean(o.batch_lag for o in ours),
        },
    }


def gains(preset: str, seeds: Sequence[int]) -> dict[str, Any]:
    """Return what ``rollover`` trains for each token of ``sync``, by unit and batch lag."""
    syncs = [run("sync", preset, seed) for seed in seeds]
    found: dict[str, Any] = {}
    for unit in ("group", "sample"):
        for target in TARGETS:
            ours = [run("rollover", preset, seed, unit=unit, lag_target=target) for seed in seeds]
            ratios = [o.tokens_per_s / s.tokens_per_s for o, s in zip(ours, syncs, strict=True)]
            found[f"{unit} at {target:g}"] = row = asdict(MeanOverSeeds.of(ratios))
            row["lag"] = statistics.fmean(o.batch_lag for o in ours)
            print(f"{preset}, {unit}s: {row['mean']:.2f} times sync at {row['lag']:.2f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="r1-16k,qwen3-16k,heavy-32k,light-8k")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--gains", action="store_true", help="over sync, at some lags")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for preset in options.presets.split(","):
        found[preset] = gains(preset, range(options.seeds)) if options.gains else {}
        for ratio in () if options.gains else RATIOS:
            found[preset][f"{ratio:g}"] = row = compare(preset, ratio, range(options.seeds))
            lags = "lag {april:.2f} and {rollover:.2f}".format(**row["lag"])
            print(f"{preset} r = {ratio:g}: {row['ratio']['mean']:.3f}, {lags}", flush=True)
    settings = {"N": 32, "G": 8, "B0": 256, "steps": STEPS, "warmup": WARMUP}
    command = (
        f"benchmarks/equal_lag.py --presets {options.presets} --seeds {options.seeds}" + " --gains" * options.gains
    )
    record = {"command": command, "settings": settings, "presets": found}
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
