"""Throughput against lag: `rollover` against APRIL and the best of the rivals, simulated, paired, with intervals.

    python benchmarks/frontier.py                  # four presets, one and four replicas, 20 seeds: about an hour
    python benchmarks/frontier.py --seeds 2 --presets light-8k

N = 32 prompts of G = 8 samples, B0 = 256 in all, training time left out: what the scheduler alone changes. Every
strategy has an engine that keeps its cache over new weights; APRIL is run once more as published, without. Lengths are
the same for all settings of a seed. First each rival's settings are screened with two seeds, then the best at each lag
are run with all seeds; `rollover` is told their lag, and compared with them seed by seed. Strategies whose lag is 0
(`sync`, `probe`, `tail_rounds`, `oversample`) are not on the curve. Strategies that train several batches at a time
(`windowed` and `sorted` here) repeat every 2, 3, 4 or 6 steps: the 24 steps measured are a multiple of each.
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
from typing import Any

from rollover.frontier.sweep import Estimate, Length, Outcome, Runner, Trial, run_trials, workers
from rollover.rollout.config import RolloutConfig
from rollover.sim.models import ReplicaModel
from rollover.sim.scenario import Scenario
from rollover.workload.presets import PRESETS

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
    ("windowed", "max_staleness", (1, 2, 3, 5)),
    ("sorted", "over_sampling_batch_size", (64, 96)),
    ("token_budget", "tokens_per_round", (2048, 4096)),
)
TARGETS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)


def config(strategy: str, cap: int, **options: Any) -> RolloutConfig:
    bound = {} if strategy == "sync" else {"max_staleness": UNBOUND}
    bound |= options
    return RolloutConfig(
        strategy=strategy,  # type: ignore[arg-type]
        rollout_batch_size=N,
        group_size=G,
        max_new_tokens=cap,
        **bound,
    )


def ours(cap: int, lag: float) -> RolloutConfig:
    return config("rollover", cap, unit="sample", lag_target=lag)


def scenario(replicas: int, *, keep: bool = True) -> Scenario:
    model = ReplicaModel(c0_s=1.0, b0=B0 / replicas, prefill_tokens_per_s=PREFILL)
    return Scenario(replicas=(model,) * replicas, kv_on_update="keep" if keep else "recompute")


class Bench:
    """Runs settings of one preset over seeds."""

    def __init__(self, preset: str, replicas: int, length: Length, runner: Runner) -> None:
        self.law = PRESETS[preset]
        self.replicas, self.length, self.runner = replicas, length, runner

    def run(self, settings: Sequence[RolloutConfig], seeds: Iterable[int], *, keep: bool = True) -> list[list[Outcome]]:
        """Outcomes by setting and seed."""
        seeds = list(seeds)
        place = scenario(self.replicas, keep=keep)
        trials = [Trial(config=c, seed=s, lengths=self.law, scenario=place) for c in settings for s in seeds]
        found = run_trials(trials, self.length, self.runner)
        return [found[i * len(seeds) : (i + 1) * len(seeds)] for i in range(len(settings))]


def screened(bench: Bench, cap: int) -> list[RolloutConfig]:
    """Rival settings that no other beats at its own lag or below it."""
    settings = [config(name, cap, **{key: value}) for name, key, values in RIVALS for value in values]
    points = [
        (statistics.fmean(o.lag for o in runs), statistics.fmean(o.tokens_per_s for o in runs), setting)
        for setting, runs in zip(settings, bench.run(settings, range(2)), strict=True)
    ]
    best = [p for p in points if not any(q[0] <= p[0] and q[1] > p[1] for q in points)]
    return [setting for lag, _, setting in sorted(best, key=lambda p: p[0]) if 0.3 <= lag <= 3.3]


def study(preset: str, replicas: int, seeds: int, length: Length, runner: Runner) -> dict[str, Any]:
    cap = PRESETS[preset].cap_tokens
    bench = Bench(preset, replicas, length, runner)
    rivals = screened(bench, cap)
    every = range(seeds)
    (sync,) = bench.run([config("sync", cap)], every)
    (published,) = bench.run([config("april", cap, over_sampling_batch_size=2 * N)], every, keep=False)
    rival_runs = bench.run(rivals, every)
    ceilings = [1 + o.iterations * B0 / (o.tokens_per_s * o.step_s) for o in sync]
    # Told the lag of whom it is compared with: what counts is throughput at equal lag.
    april_lag = statistics.fmean(o.lag for o in published)
    at_april, *at_rivals = bench.run(
        [ours(cap, lag) for lag in (april_lag, *(statistics.fmean(o.lag for o in r) for r in rival_runs))], every
    )
    curve = bench.run([ours(cap, lag) for lag in TARGETS], every)

    def entry(
        setting: RolloutConfig, runs: Sequence[Outcome], against: Sequence[Outcome] | None = None
    ) -> dict[str, Any]:
        gains = [o.tokens_per_s / s.tokens_per_s for o, s in zip(runs, sync, strict=True)]
        found: dict[str, Any] = {
            "setting": {k: v for k, v in asdict(setting).items() if v != RolloutConfig.__dataclass_fields__[k].default},
            "gain": asdict(Estimate.of(gains)),
            "share_of_ceiling": statistics.fmean(g / c for g, c in zip(gains, ceilings, strict=True)),
            "trained_length": statistics.fmean(o.trained_length for o in runs),
            "wasted": max((sum(o.wasted.values()) for o in runs), default=0.0),
            "prefilled": statistics.fmean(o.prefilled for o in runs),
        } | {f: statistics.fmean(getattr(o, f) for o in runs) for f in ("lag", "lag_p95", "max_lag", "off_policy")}
        if against is not None:
            ratios = [o.tokens_per_s / a.tokens_per_s for o, a in zip(runs, against, strict=True)]
            found["over_rival"] = asdict(Estimate.of(ratios))
        return found

    return {
        "preset": preset,
        "replicas": replicas,
        "ceiling": statistics.fmean(ceilings),
        "sync_tokens_per_c0": statistics.fmean(o.tokens_per_s for o in sync),
        "april_as_published": entry(config("april", cap, over_sampling_batch_size=2 * N), published),
        "rollover_at_its_lag": entry(ours(cap, april_lag), at_april, published),
        "rivals": [entry(c, r) for c, r in zip(rivals, rival_runs, strict=True)],
        "rollover_at_theirs": [
            entry(ours(cap, statistics.fmean(o.lag for o in r)), mine, r)
            for mine, r in zip(at_rivals, rival_runs, strict=True)
        ],
        "rollover": [entry(ours(cap, lag), runs) for lag, runs in zip(TARGETS, curve, strict=True)],
    }


def show(found: dict[str, Any]) -> None:
    def line(name: str, e: dict[str, Any]) -> str:
        over = e.get("over_rival")
        ratio = f"  {over['mean']:.3f} +- {over['margin'] or 0:.3f} times the rival" if over else ""
        return (
            f"  {name:42s} gain {e['gain']['mean']:.2f} +- {e['gain']['margin'] or 0:.2f}"
            f"  {e['share_of_ceiling']:.0%} of the ceiling  lag {e['lag']:.2f}{ratio}"
        )

    print(f"\n{found['preset']}, {found['replicas']} replicas: ceiling {found['ceiling']:.2f} times sync")
    print(line("april, r = 2, as published", found["april_as_published"]))
    print(line("rollover at its lag", found["rollover_at_its_lag"]))
    for rival, mine in zip(found["rivals"], found["rollover_at_theirs"], strict=True):
        setting = {k: v for k, v in rival["setting"].items() if k not in ("max_staleness", "max_new_tokens")}
        print(line(" ".join(map(str, setting.values())), rival))
        print(line("rollover at its lag", mine))
    for mine in found["rollover"]:
        print(line(f"rollover, lag_target {mine['setting'].get('lag_target')}", mine), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--replicas", default="1,4")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=38)
    parser.add_argument("--warmup", type=int, default=14)
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
                record["studies"].append(study(preset, replicas, args.seeds, length, runner))
                show(record["studies"][-1])
                args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nrecorded in {args.out}")


if __name__ == "__main__":
    main()
