"""Throughput against lag: `rollover` against APRIL and the best of the rivals, simulated, paired, with intervals.

    python benchmarks/frontier.py --jobs 2         # four presets, one and four replicas, 20 seeds: about an hour
    python benchmarks/frontier.py --seeds 2 --presets light-8k --replicas 1

N = 32 prompts of G = 8 samples, B0 = 256 in all, training time left out: what the scheduler alone changes. Every
strategy has an engine that keeps its cache over new weights; APRIL is run once more as published, without. Lengths are
the same for all settings of a seed. First each rival's settings are screened with one seed; of those with a batch lag
of about a target or less, the fastest is run with all seeds. `rollover` is told its lag, and compared seed by seed.

Strategies whose lag is 0 (`sync`, `probe`, `tail_rounds`, `oversample`) are not on the curve. Of strategies that train
several batches from one collection (`windowed`, `sorted`, `rollover`), whole rounds are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any, Literal

from rollover.frontier.sweep import Length, MeanOverSeeds, Runner, Trial, TrialResult, run_trials, workers
from rollover.rollout.config import RolloutConfig
from rollover.sim.scenario import ReplicaModel, Scenario
from rollover.sim.strategies import SimulatedRollout
from rollover.workload.source import PRESETS

HERE = Path(__file__).parent
N, G, B0, PREFILL = 32, 8, 256.0, 1600.0
UNBOUND = 60
"""A staleness bound that never binds: the curves are those of the strategies, not of the bound. `windowed` has no other
limit, so there it is the setting."""
RIVALS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("april", "over_sampling_batch_size", (40, 48, 64, 96, 128)),
    ("concurrency", "num_running", (128, 192, 256, 384, 512)),
    ("inflight", "num_running", (256, 384, 512)),
    ("bounded_async", "num_running", (256, 384, 512)),
    ("threshold", "staleness_threshold", (0.5, 1.0, 2.0)),
    ("windowed", "max_staleness", (1, 2, 3, 4, 5, 6)),
    ("sorted", "over_sampling_batch_size", (64, 96, 128, 160, 224)),
    ("token_budget", "tokens_per_round", (2048, 4096)),
)


def config(strategy: str, cap: int, **options: Any) -> RolloutConfig:
    bound = {} if strategy == "sync" else {"max_staleness": UNBOUND}
    bound |= options
    return SimulatedRollout.of(
        strategy,
        rollout_batch_size=N,
        group_size=G,
        max_new_tokens=cap,
        **bound,
    )


def ours(cap: int, lag: float, unit: Literal["group", "sample"] = "sample", **options: Any) -> RolloutConfig:
    return config("rollover", cap, unit=unit, lag_target=lag, **options)


def scenario(replicas: int, *, keep: bool = True) -> Scenario:
    model = ReplicaModel(c0_s=1.0, b0=B0 / replicas, prefill_tokens_per_s=PREFILL)
    return Scenario(replicas=(model,) * replicas, kv_on_update="keep" if keep else "recompute")


class Bench:
    """Runs settings of one preset over seeds."""

    def __init__(self, preset: str, replicas: int, length: Length, runner: Runner) -> None:
        self.preset, self.law = preset, PRESETS[preset]
        self.replicas, self.length, self.runner = replicas, length, runner

    def run(
        self, settings: Sequence[RolloutConfig], seeds: Iterable[int], *, keep: bool = True
    ) -> list[list[TrialResult]]:
        """Outcomes by setting and seed."""
        seeds = list(seeds)
        place = scenario(self.replicas, keep=keep)
        trials = [Trial(config=c, seed=s, lengths=self.law, scenario=place) for c in settings for s in seeds]
        found = run_trials(trials, self.length, self.runner)
        return [found[i * len(seeds) : (i + 1) * len(seeds)] for i in range(len(settings))]


def written(setting: RolloutConfig) -> dict[str, Any]:
    """What the setting says, options beside the rest; what is shared and at its default is left out."""
    usual = asdict(RolloutConfig()) | {"unit": None}
    shared = {key: value for key, value in asdict(setting).items() if key != "strategy" and value != usual[key]}
    options = {key: value for key, value in asdict(setting.strategy).items() if value is not None}
    return {"strategy": options.pop("kind"), **shared, **options}


def mean_lag(runs: Sequence[TrialResult]) -> float:
    return statistics.fmean(o.lags.batch for o in runs)


def screened(bench: Bench, cap: int, targets: Sequence[float]) -> list[RolloutConfig]:
    """Of the rivals' settings the fastest with a lag of about each target or less."""
    settings = [config(name, cap, **{key: value}) for name, key, values in RIVALS for value in values]
    points = [
        (mean_lag(runs), statistics.fmean(o.tokens_per_s for o in runs), setting)
        for setting, runs in zip(settings, bench.run(settings, range(1)), strict=True)
    ]
    fastest = [max((p for p in points if p[0] <= target + 0.1), key=lambda p: p[1]) for target in targets]
    return list(dict.fromkeys(setting for _, _, setting in fastest))


def study(bench: Bench, targets: Sequence[float], num_seeds: int) -> dict[str, Any]:
    cap = bench.law.cap_tokens
    rivals = screened(bench, cap, targets)
    every = range(num_seeds)
    (sync,) = bench.run([config("sync", cap)], every)
    (published,) = bench.run([config("april", cap, over_sampling_batch_size=2 * N)], every, keep=False)
    rival_runs = bench.run(rivals, every)
    ceilings = [B0 / o.tokens_per_s for o in sync]  # engines that only read caches

    def entry(
        setting: RolloutConfig, runs: Sequence[TrialResult], against: Sequence[TrialResult] | None = None
    ) -> dict[str, Any]:
        gains = [o.tokens_per_s / s.tokens_per_s for o, s in zip(runs, sync, strict=True)]
        found: dict[str, Any] = {
            "setting": written(setting),
            "gain": asdict(MeanOverSeeds.of(gains)),
            "share_of_ceiling": statistics.fmean(g / c for g, c in zip(gains, ceilings, strict=True)),
            "trained_length": asdict(MeanOverSeeds.of([o.trained_length for o in runs])),
            "wasted": max((sum(o.wasted.values()) for o in runs), default=0.0),
            "prefilled": statistics.fmean(o.prefilled for o in runs),
        } | {
            f"{name}_lag": statistics.fmean(getattr(o.lags, name) for o in runs)
            for name in ("batch", "token", "group", "head", "max")
        }
        if against is not None:
            ratios = [o.tokens_per_s / a.tokens_per_s for o, a in zip(runs, against, strict=True)]
            found["over_rival"] = asdict(MeanOverSeeds.of(ratios))
        return found

    def pair(rival: RolloutConfig, runs: Sequence[TrialResult]) -> dict[str, Any]:
        """Ours at the rival's lag."""
        mine = ours(cap, mean_lag(runs))
        (plain,) = bench.run([mine], every)
        return {"rival": entry(rival, runs), "rollover": entry(mine, plain, runs)}

    whole = ours(cap, mean_lag(published), "group")
    return {
        "preset": bench.preset,
        "replicas": bench.replicas,
        "ceiling": statistics.fmean(ceilings),
        "sync_tokens_per_c0": statistics.fmean(o.tokens_per_s for o in sync),
        "april_as_published": pair(config("april", cap, over_sampling_batch_size=2 * N), published)
        | {"rollover_by_groups": entry(whole, bench.run([whole], every)[0], published)},
        "rivals": [pair(c, r) for c, r in zip(rivals, rival_runs, strict=True)],
    }


def show(found: dict[str, Any]) -> None:
    def line(name: str, e: dict[str, Any]) -> str:
        over = e.get("over_rival")
        ratio = f"  {over['mean']:.3f} +- {over['margin'] or 0:.3f} times the rival" if over else ""
        return (
            f"  {name:34s} gain {e['gain']['mean']:.2f} +- {e['gain']['margin'] or 0:.2f}"
            f"  {e['share_of_ceiling']:4.0%} of the ceiling  lag {e['batch_lag']:.2f}  max {e['max_lag']:.0f}{ratio}"
        )

    print(f"\n{found['preset']}, {found['replicas']} replicas: ceiling {found['ceiling']:.2f} times sync")
    for pair in (found["april_as_published"], *found["rivals"]):
        setting = pair["rival"]["setting"]
        words = [str(v) for k, v in setting.items() if k not in ("max_staleness", "max_new_tokens")]
        if setting["strategy"] == "windowed":
            words.append(str(setting["max_staleness"]))
        print(line(" ".join(words), pair["rival"]))
        if "rollover_by_groups" in pair:
            print(line("  rollover at its lag, whole groups", pair["rollover_by_groups"]))
        print(line("  rollover at its lag", pair["rollover"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--replicas", default="1,4")
    parser.add_argument("--targets", default="0.5,1,1.5,2,2.5,3", help="lags near which the best rivals are met")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=72)
    parser.add_argument("--warmup", type=int, default=24)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=HERE / "results" / f"frontier-{date.today()}.json")
    args = parser.parse_args()
    length = Length(steps=args.steps, warmup=args.warmup)
    record: dict[str, Any] = {
        "settings": vars(args) | {"out": args.out.name, "N": N, "G": G, "B0": B0, "prefill_tokens_per_c0": PREFILL},
        "python": platform.python_version(),
        "studies": [],
    }
    with workers(args.jobs) as runner:
        for preset in args.presets.split(","):
            for replicas in map(int, args.replicas.split(",")):
                bench = Bench(preset, replicas, length, runner)
                targets = [float(lag) for lag in args.targets.split(",")]
                record["studies"].append(study(bench, targets, args.seeds))
                show(record["studies"][-1])
                args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nrecorded in {args.out}")


if __name__ == "__main__":
    main()
