"""Draws the figures of ``theory.md``, and records simulated runs of each preset next to the closed forms.

``python docs/generate_theory.py benchmarks/results/theory-DATE.json`` takes a few minutes. One pooled engine in units
of c0: B0 = 256, prefill at 1600 tokens per c0, 32 groups of 8, 90 steps of which 20 are warm-up, no training time,
caches lost at each update.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

from rollover.rollout.round import best_rounds
from rollover.rollout.statistics import RecentLengths
from rollover.sim.run import simulate
from rollover.sim.scenario import ReplicaModel, Scenario
from rollover.sim.strategies import SimulatedRollout
from rollover.sim.theory import StepModel
from rollover.workload.source import PRESETS

IMAGES = Path(__file__).with_name("images")
B0, PREFILL, BATCH, GROUP = 256.0, 1600.0, 32, 8
STEPS, WARM_UP = 90, 20
NAMES = ("r1-16k", "qwen3-16k", "heavy-32k")
NUM_GROUPS = 20_000
"""From which the closed forms are computed."""
RATIOS = (1.25, 1.5, 2, 2.5, 3)
CONCURRENCIES = (128, 256, 384, 512)
LAGS = (0.5, 1.0, 1.5, 2.0, 3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The steady state of a run."""

    label: str
    tokens_per_c0: float
    iterations: float
    prefill: float
    lag: float
    head_lag: float
    mean_length: float


def model_of(preset: str) -> StepModel:
    workload = PRESETS[preset].workload()
    lengths_PG = [workload.group_lengths(i, GROUP) for i in range(NUM_GROUPS)]
    return StepModel.of_lengths(lengths_PG, batch_size=BATCH, b0=B0)


def play(preset: str, name: Literal["sync", "april", "concurrency", "rollover"], label: str, **options: Any) -> Point:
    config = SimulatedRollout.of(
        name,
        rollout_batch_size=BATCH,
        group_size=GROUP,
        max_new_tokens=PRESETS[preset].cap_tokens,
        max_staleness=0 if name == "sync" else 99,
        **options,
    )
    scenario = Scenario(replicas=(ReplicaModel(c0_s=1.0, b0=B0, prefill_tokens_per_s=PREFILL),))
    strategy = config.build_strategy(scenario.capabilities)
    scale = 3 if name == "rollover" else 1  # whose rounds are of several steps
    simulation = simulate(strategy, PRESETS[preset].workload(), scenario, steps=scale * STEPS)
    window = simulation.after(scale * WARM_UP)
    return Point(
        label=label,
        tokens_per_c0=window.tokens_per_s,
        iterations=window.iterations,
        prefill=window.prefilled_tokens / PREFILL / len(window.steps),
        lag=window.lag.token,
        head_lag=window.lag.head,
        mean_length=window.mean_length,
    )


def points_of(preset: str) -> dict[str, list[Point]]:
    """Return the runs of each strategy."""
    rounds = [play(preset, "april", f"r = {r:g}", over_sampling_batch_size=int(r * BATCH)) for r in RATIOS]
    refills = [play(preset, "concurrency", f"C = {c}", num_running=c) for c in CONCURRENCIES]
    ours = [play(preset, "rollover", f"{lag:g}", unit="sample", lag_target=lag) for lag in LAGS]
    return {"sync": [play(preset, "sync", "sync")], "april": rounds, "concurrency": refills, "rollover": ours}


def round_gains(preset: str, model: StepModel, lags: Sequence[float]) -> list[float]:
    """Return the gains of the best rounds of single samples, with caches kept."""
    workload = PRESETS[preset].workload()
    lengths = RecentLengths(tuple((n,) for i in range(1000) for n in workload.group_lengths(i, GROUP)))
    gains = []
    for lag in lags:
        younger, older = best_rounds(lengths, target_lag=lag, max_staleness=99, batch_size=BATCH * GROUP)
        share = (lag - younger.lag) / (older.lag - younger.lag) if older is not younger else 0.0
        iterations = younger.iterations_per_batch * (1 - share) + older.iterations_per_batch * share
        gains.append(model.gain(iterations))
    return gains


def draw_frontier(models: dict[str, StepModel], runs: dict[str, dict[str, list[Point]]], path: Path) -> None:
    """Plot the gain over sync against lag: the curve, and the runs without and with their prefill."""
    figure, axes = plt.subplots(1, len(models), figsize=(13, 4.2))
    for axis, (preset, model) in zip(axes, models.items(), strict=True):
        lags = np.linspace(0.35, 5.2, 200)
        axis.plot(lags, [model.gain_at_lag(x) for x in lags], color="#334", label="closed form, whole groups")
        by_sample = [model.gain_at_lag(x, whole_groups=False) for x in lags]
        axis.plot(lags, by_sample, color="#334", ls=":", label="closed form, single samples")
        gains = round_gains(preset, model, lags.tolist())
        axis.plot(lags, gains, color="#393", lw=1, label="rounds, single samples")
        axis.axhline(model.ceiling, color="#999", lw=1, ls="--", label="ceiling")
        sync = runs[preset]["sync"][0]
        for name, color in (("april", "#c33"), ("concurrency", "#27a"), ("rollover", "#393")):
            points = runs[preset][name]
            kept = [model.gain(p.iterations) for p in points]
            axis.plot([p.lag for p in points], kept, "o", color=color, label=f"{name}, caches kept")
            lost = [p.tokens_per_c0 / sync.tokens_per_c0 for p in points]
            axis.plot([p.lag for p in points], lost, "o", mfc="none", color=color, label=f"{name}, caches lost")
            place, side = ((4, -11), "left") if name == "concurrency" else ((-4, 5), "right")
            for point, height in zip(points, kept, strict=True):
                at = (point.lag, height)
                axis.annotate(point.label, at, place, textcoords="offset points", fontsize=7, ha=side)
        axis.set(title=preset, xlabel="lag (mean over trained tokens, versions)", xlim=(0, 5.2), ylim=(0.8, None))
    axes[0].set_ylabel("throughput / synchronous")
    axes[0].legend(fontsize=7, loc="lower right")
    _save(figure, path)


def draw_hyperbola(models: dict[str, StepModel], runs: dict[str, dict[str, list[Point]]], path: Path) -> None:
    """Plot lag times K over kappa against lag."""
    figure, axis = plt.subplots(figsize=(6.5, 3.8))
    for (preset, model), marker in zip(models.items(), "osD", strict=True):
        for name, color in (("april", "#c33"), ("concurrency", "#27a")):
            points = runs[preset][name]
            ratio = [p.lag * p.iterations / model.kappa for p in points]
            axis.plot([p.lag for p in points], ratio, marker, color=color, label=f"{name}, {preset}")
    axis.axhline(1, color="#334", lw=1)
    axis.set(xlabel="lag (versions)", ylabel="lag K / kappa", ylim=(0, 1.2))
    axis.legend(fontsize=7, ncol=2)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    """Write the figure, so that the same figure gives the same file."""
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def record(models: dict[str, StepModel], runs: dict[str, dict[str, list[Point]]]) -> dict[str, Any]:
    """Return what the tables of ``theory.md`` are written from."""
    return {
        "settings": {"B0": B0, "N": BATCH, "G": GROUP, "steps": STEPS, "warm_up": WARM_UP, "groups": NUM_GROUPS},
        "models": {name: asdict(model) | {"at_cap": PRESETS[name].truncated} for name, model in models.items()},
        "runs": {name: {kind: [asdict(p) for p in of] for kind, of in kinds.items()} for name, kinds in runs.items()},
    }


if __name__ == "__main__":
    matplotlib.use("svg")
    matplotlib.rcParams |= {
        "svg.hashsalt": "theory",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    drawn = {name: model_of(name) for name in NAMES}
    all_runs = {name: points_of(name) for name in NAMES}
    draw_frontier(drawn, all_runs, IMAGES / "theory-frontier.svg")
    draw_hyperbola(drawn, all_runs, IMAGES / "theory-kappa.svg")
    found = record(drawn | {"light-8k": model_of("light-8k")}, all_runs)
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
