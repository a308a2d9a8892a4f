"""Rounds in closed form beside the simulator: iterations per batch, lag, and how much batches of a round differ.

    python benchmarks/rounds.py --out benchmarks/results/rounds-DATE.json       # a minute

N = 32 prompts of G = 8 samples, each trained by itself; caches are kept, and B0 = 256. The same round is repeated:
what ``rollover.rollout.round`` says of it follows from the lengths of 1,000 prompts alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollover.rollout.round import Round, rounds_within
from rollover.rollout.state import View
from rollover.rollout.statistics import RecentLengths
from rollover.rollout.strategies.rollover import Rollover
from rollover.sim.run import simulate
from rollover.sim.scenario import ReplicaModel, Scenario
from rollover.workload.source import PRESETS

N, G = 32, 8
STEPS, WARMUP = 120, 24
SCENARIO = Scenario(replicas=(ReplicaModel(c0_s=1.0, b0=256.0, prefill_tokens_per_s=1600.0),), kv_on_update="keep")
ROUNDS = (
    *(("r1-16k", 2, 1.0), ("r1-16k", 4, 1.0), ("r1-16k", 1, 1.5)),
    *(("light-8k", 1, 1.1), ("light-8k", 2, 1.25), ("light-8k", 3, 1.1)),
    *(("heavy-32k", 3, 1.25), ("qwen3-16k", 2, 1.5)),
)
"""Lengths, batches in a round, and groups in flight at its start over those that it trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated(Rollover):
    """Collects the same round again and again."""

    repeated: Round

    def round(self, view: View) -> Round:
        return self.repeated


def compare(preset: str, num_batches: int, ratio: float) -> dict[str, Any]:
    law = PRESETS[preset]
    workload = law.workload(1)
    lengths = RecentLengths(tuple((n,) for i in range(1000) for n in workload.group_lengths(i, G)))
    known = [r for r in rounds_within(lengths, 60, N * G, float("inf")) if r.num_batches == num_batches]
    found = min(known, key=lambda r: abs(r.ratio - ratio))
    strategy = Repeated(
        batch_size=N * G,
        group_size=1,
        num_siblings=G,
        max_staleness=60,
        target_lag=1.0,
        num_running=2**31,
        prefill_tokens_per_iteration=float("inf"),
        repeated=found,
    )
    window = simulate(strategy, law.workload(2), SCENARIO, steps=STEPS).after(WARMUP)
    tokens = [sum(step.lengths) for step in window.steps]
    return {
        "preset": preset,
        "round": asdict(found),
        "simulated": {
            "iterations_per_batch": window.iterations,
            "lag": window.lag.batch,
            "spread": statistics.pstdev(tokens) / statistics.fmean(tokens),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for case in ROUNDS:
        rows.append(row := compare(*case))
        form, found = row["round"], row["simulated"]
        print(
            f"{row['preset']} m = {form['num_batches']}, r = {form['ratio']:.2f}:"
            f" K {form['iterations_per_batch']:,.0f} and {found['iterations_per_batch']:,.0f},"
            f" lag {form['lag']:.2f} and {found['lag']:.2f}, spread {found['spread']:.2f}",
            flush=True,
        )
    options.out.write_text(json.dumps({"command": "benchmarks/rounds.py", "rounds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
