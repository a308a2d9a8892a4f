"""Where each strategy leads: gain over `sync` at a batch lag, for lengths, caches, trainers and replicas (simulated).

    python benchmarks/map.py --out benchmarks/results/map-DATE.json  # 48 cells, one seed, 45 minutes
    python benchmarks/map.py --only light-8k/kept/one/1 --out map.json  # one cell; what is there is kept

N = 32, G = 8, B0 = 256 for all replicas together, 1,600 tokens of prefill in the time of an iteration, whole groups,
no staleness bound but where it is the setting. A third of the steps is warm-up: overlapped rounds take some thirty
steps to settle, and after that count batches that they collected before. Each strategy runs with the settings below, on
the lengths that `sync` has with that seed. Its gain at a lag is that of its two settings around the lag in turns (time
per token is interpolated, `sync` being one end), its fastest setting if that is younger. Lag is the mean over batches
of the mean age of their tokens. A trainer of its own takes 20 or 50 % of the loop of `sync`; with one machine training
time is left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from rollover.frontier.sweep import Length, MeanOverSeeds, Trial, TrialResult, run_trial
from rollover.rollout.config import RolloutConfig
from rollover.sim.scenario import Latency, ReplicaModel, Scenario
from rollover.sim.strategies import SimulatedRollout
from rollover.sim.theory import StepModel
from rollover.workload.source import PRESETS

N, G, B0, PREFILL, FREE = 32, 8, 256.0, 1600.0, 60
LAGS = (0.25, 0.5, 1.0, 2.0)
PRESET_NAMES = ("r1-16k", "qwen3-16k", "heavy-32k", "light-8k")
SHARES = {"one": 0.0, "20%": 0.2, "50%": 0.5}
"""Share of the trainer in the loop of `sync`; with one machine it is left out."""
Setting = tuple[str, dict[str, Any]]
SETTINGS: tuple[Setting, ...] = (
    *(("april", {"over_sampling_batch_size": n, "max_staleness": FREE}) for n in (40, 48, 64, 96)),
    *(("concurrency", {"num_running": n, "max_staleness": FREE}) for n in (128, 256, 512)),
    *(("inflight", {"num_running": n, "max_staleness": FREE}) for n in (128, 256, 512)),
    *(("bounded_async", {"max_staleness": bound}) for bound in (1, 2, 3)),
    *(("windowed", {"max_staleness": bound}) for bound in (1, 2, 3)),
    *(("rollover", {"lag_target": lag, "max_staleness": FREE}) for lag in LAGS),
)


def scenario(replicas: int, kept: bool, training: float) -> Scenario:
    model = ReplicaModel(c0_s=1.0, b0=B0 / replicas, prefill_tokens_per_s=PREFILL)
    return Scenario(
        replicas=(model,) * replicas,
        kv_on_update="keep" if kept else "recompute",
        trainer=Latency(base_s=training),
    )


def run(preset: str, setting: Setting, where: Scenario, seed: int, length: Length) -> TrialResult:
    kind, options = setting
    if kind == "rollover":
        options = options | {"overlap": not where.trainer.is_zero}
    law = PRESETS[preset]
    shape = {"rollout_batch_size": N, "group_size": G, "max_new_tokens": law.cap_tokens}
    config: RolloutConfig = SimulatedRollout.of(kind, **shape, **options)
    return run_trial(Trial(config=config, seed=seed, lengths=law, scenario=where), length=length)


def at_lag(points: Sequence[tuple[float, float]], lag: float) -> float:
    """Return the gain at a lag of settings, (lag, gain) each, that take turns with each other or with `sync`."""
    best = 1.0
    for (young, slow), (old, fast) in itertools.combinations(sorted([(0.0, 1.0), *points]), 2):
        if old <= lag:
            best = max(best, fast)
        elif young <= lag:
            best = max(best, 1 / (1 / slow + (1 / fast - 1 / slow) * (lag - young) / (old - young)))
    return best


def clairvoyant(lengths: np.ndarray, model: StepModel, lag: float) -> float:
    """Return the gain of a schedule that knows all lengths, at a lag: a batch ends every K iterations, and each of its
    samples starts as many iterations before that as it has tokens. One that is d iterations from its end is d // K
    versions older."""

    def lag_of(iterations: float) -> float:
        whole = lengths // iterations
        return float((whole * (lengths - iterations * (whole + 1) / 2)).sum() / lengths.sum())

    low, high = 1.0, model.sync_iterations
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if lag_of(middle) > lag else (low, middle)
    return model.gain(high)


def cell(preset: str, caches: str, trainer: str, replicas: int, seed: int, length: Length) -> dict[str, Any]:
    """Return the points of all settings with the lengths of one seed, and the gains that follow from them."""
    alone = run(preset, ("sync", {}), scenario(replicas, caches == "kept", 0.0), seed, length)
    share = SHARES[trainer]
    where = scenario(replicas, caches == "kept", share / (1 - share) * alone.step_s)
    sync = run(preset, ("sync", {}), where, seed, length) if share else alone
    points: dict[str, list[tuple[float, float]]] = {}
    for setting in SETTINGS:
        found = run(preset, setting, where, seed, length)
        points.setdefault(setting[0], []).append((found.lags.batch, found.tokens_per_s / sync.tokens_per_s))
    return {
        "points": {kind: np.round(of, 4).tolist() for kind, of in points.items()},
        "gains": {kind: {f"{lag:g}": round(at_lag(of, lag), 4) for lag in LAGS} for kind, of in points.items()},
        "step_s": sync.step_s,
    }


def limits(preset: str, trainer: str) -> dict[str, Any]:
    """Return what no schedule exceeds."""
    share = SHARES[trainer]
    workload = PRESETS[preset].workload()
    rows = [workload.group_lengths(i, G) for i in range(2048)]
    model = StepModel.of_lengths(rows, batch_size=N, b0=B0)
    known = {f"{lag:g}": round(clairvoyant(np.array(rows, dtype=float), model, lag), 4) for lag in LAGS}
    return {
        "clairvoyant": known if trainer == "one" else None,
        "ceiling": min(model.ceiling / (1 - share), 1 / share if share else math.inf),
    }


def vars_of(mean: MeanOverSeeds) -> dict[str, Any]:
    return {"mean": round(mean.mean, 4), "margin": None if mean.margin is None else round(mean.margin, 4)}


def over_seeds(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the mean gains, each with half the width of its 95 % interval."""
    return {
        kind: {lag: vars_of(MeanOverSeeds.of([r["gains"][kind][lag] for r in runs])) for lag in gains}
        for kind, gains in runs[0]["gains"].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="more can be added to a record")
    parser.add_argument("--steps", type=int, default=144)
    parser.add_argument("--only", default="*", help="a pattern of cells, PRESET/CACHES/TRAINER/REPLICAS, such as '*/1'")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    length = Length(steps=options.steps, warmup=options.steps // 3)
    settings = {"N": N, "G": G, "B0": B0, "steps": length.steps, "warmup": length.warmup}
    empty: dict[str, Any] = {"settings": settings, "cells": {}}
    record = json.loads(options.out.read_text()) if options.out.exists() else empty
    if record["settings"] != settings:
        parser.error(f"{options.out} has other settings: {record['settings']}")
    cells = itertools.product(PRESET_NAMES, ("kept", "lost"), SHARES, (1, 4))
    for seed, where in itertools.product(range(options.seeds), cells):
        name = "/".join(map(str, where))
        if not fnmatch(name, options.only):
            continue
        found = record["cells"].setdefault(name, {"seeds": [], **limits(where[0], where[2])})
        if len(found["seeds"]) > seed:
            continue
        found["seeds"].append(cell(*where, seed, length))
        found["gains"] = gains = over_seeds(found["seeds"])
        leaders = {lag: max(gains, key=lambda k: gains[k][lag]["mean"]) for lag in ("0.5", "1")}
        print(name, seed, {lag: (k, gains[k][lag]["mean"]) for lag, k in leaders.items()}, flush=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
