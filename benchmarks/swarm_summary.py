"""What the runs of the swarm benchmark say together: means over seeds with 95 % intervals, paired by seed, and the
simulator's forecast of the same.

A time to an accuracy is where the straight line between two evaluations meets it first. The accuracies are shares of
the gain that the worse of the two arms has made by its last step, so that both get there.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from edge import EdgeMachine

from rollover.rollout.config import RolloutConfig
from rollover.rollout.strategies import BoundedAsyncConfig, SyncConfig
from rollover.sim.run import simulate
from rollover.sim.scenario import Latency, ReplicaModel, Scenario
from rollover.workload.trace import Trace, TracePrompt

Record = dict[str, Any]
SHARES = (0.5, 0.75, 0.9)
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds, and half of the width of its 95 % interval (Student's t).

    Example: ``Interval.of([1.9, 2.1, 2.0])`` is 2.0 ± 0.25.
    """

    mean: float
    half: float
    number: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        n = len(values)
        half = _T95[min(n - 1, 9)] * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
        return cls(statistics.fmean(values), half, n)

    def json(self) -> list[float | None]:
        return [round(self.mean, 5), None if math.isnan(self.half) else round(self.half, 5)]

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if math.isnan(self.half) else f" ± {self.half:.3f}")


def ratio(over: Sequence[float], under: Sequence[float]) -> Interval:
    """The geometric mean of paired ratios; the half width is that of its upper side."""
    logs = Interval.of([math.log(a / b) for a, b in zip(over, under, strict=True)])
    mean = math.exp(logs.mean)
    return Interval(mean, math.nan if math.isnan(logs.half) else mean * (math.exp(logs.half) - 1), logs.number)


def curve(run: Record) -> list[tuple[int, float, float]]:
    """(steps done, seconds, accuracy) of every evaluation of a run."""
    time_s = {step["step"] + 1: step["time_s"] for step in run["steps"]}
    points = [(int(version), found["accuracy"]) for version, found in run["evaluations"].items()]
    return [(version, time_s[version] if version else 0.0, accuracy) for version, accuracy in sorted(points)]


def first_at(points: Sequence[tuple[float, float]], level: float) -> float:
    """Where the curve meets a level first."""
    if points[0][1] >= level:
        return points[0][0]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if y1 >= level:
            return x0 + (x1 - x0) * (level - y0) / (y1 - y0)
    return math.nan


def summarize(runs: dict[tuple[str, int], Record], arms: Sequence[str]) -> Record:
    """All figures of one task. ``runs``: by arm and seed."""
    seeds = sorted({seed for _, seed in runs if all((arm, seed) in runs for arm in arms)})
    if not seeds:
        return {}

    def over_seeds(figure: Callable[[Record], float], arm: str) -> list[float]:
        return [figure(runs[arm, seed]) for seed in seeds]

    found: Record = {"seeds": seeds, "arms": {}, "paired": {}}
    for arm in arms:
        curves = [curve(runs[arm, seed]) for seed in seeds]
        found["arms"][arm] = {
            "accuracy_by_step": {
                str(points[0][0]): Interval.of([accuracy for _, _, accuracy in points]).json()
                for points in zip(*curves, strict=True)
            },
            "time_by_step_s": {
                str(points[0][0]): Interval.of([time_s for _, time_s, _ in points]).json()
                for points in zip(*curves, strict=True)
            },
            "wall_s": Interval.of(over_seeds(lambda r: r["wall_s"], arm)).json(),
            "step_s": Interval.of(over_seeds(lambda r: r["wall_s"] / len(r["steps"]), arm)).json(),
            "train_s": Interval.of(over_seeds(_mean_train_s, arm)).json(),
            "staleness_mean": Interval.of(over_seeds(lambda r: r["staleness"]["mean"], arm)).json(),
            "staleness_max": max(over_seeds(lambda r: r["staleness"]["max"], arm)),
            "trainer_idle": Interval.of(over_seeds(lambda r: r["idle"]["trainer"], arm)).json(),
            "decoded_tokens": Interval.of(over_seeds(lambda r: r["decoded_tokens"], arm)).json(),
            "wasted_tokens": Interval.of(over_seeds(lambda r: sum(r["wasted_tokens"].values()), arm)).json(),
        }
        if arm != "co-located":
            found["arms"][arm] |= _of_members([runs[arm, seed] for seed in seeds])
    for arm in arms:
        if arm != "co-located" and "co-located" in arms:
            found["paired"][f"{arm} - co-located"] = {
                str(a[0]): Interval.of(
                    [
                        dict((v, x) for v, _, x in curve(runs[arm, seed]))[a[0]]
                        - dict((v, x) for v, _, x in curve(runs["co-located", seed]))[a[0]]
                        for seed in seeds
                    ]
                ).json()
                for a in curve(runs[arm, seeds[0]])
            }
    if {"pull", "push-pull"} <= set(arms):
        found["pull_over_push_pull"] = _speed_up([(runs["pull", s], runs["push-pull", s]) for s in seeds])
    if {"co-located", "pull"} <= set(arms):
        pairs = [(runs["co-located", s]["batches"], runs["pull", s]["batches"]) for s in seeds]
        found["equal_batches"] = {
            what: [_num_equal(one, other, what) for one, other in pairs] for what in ("tokens", "logprobs")
        }
        found["equal_weights"] = [runs["co-located", s]["checkpoints"] == runs["pull", s]["checkpoints"] for s in seeds]
    return found


def _mean_train_s(run: Record) -> float:
    return statistics.fmean(step["train_s"] for step in run["steps"])


def _num_equal(one: Sequence[Record], other: Sequence[Record], what: str) -> int:
    """Batches from the first on that are equal in ``what``."""
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        if a[what] != b[what]:
            return i
    return len(one)


def _figure(keys: Sequence[str], run: Record) -> float:
    """Return what stands in a record under these keys, one inside the other."""
    found: Any = run
    for key in keys:
        found = found[key]
    return found


def _of_members(runs: Sequence[Record]) -> Record:
    def interval(figure: Callable[[Record], float]) -> list[float | None]:
        return Interval.of([figure(run) for run in runs]).json()

    idle = "idle", "members"
    names = list(runs[0]["idle"]["members"])
    weights = [run["weights"] for run in runs]
    deltas = [w["publications"]["delta"] for w in weights if "delta" in w["publications"]]
    return {
        "members_idle": interval(lambda r: statistics.fmean(m["machine"] for m in r[idle[0]][idle[1]].values())),
        "places_idle": interval(lambda r: statistics.fmean(m["places"] for m in r[idle[0]][idle[1]].values())),
        "idle_by_member": {name: interval(partial(_figure, (*idle, name, "machine"))) for name in names},
        "full_bytes": weights[0]["full_bytes"],
        "full_wire_bytes": weights[0]["publications"]["full"]["wire_bytes"],
        "delta_wire_bytes": statistics.fmean(d["wire_bytes"] for d in deltas) if deltas else None,
        "wire_bytes": interval(lambda r: r["weights"]["wire_bytes"]),
        **{
            name: {key: interval(partial(_figure, ("weights", name, key))) for key in ("mean", "p95", "max")}
            for name in ("prepare_s", "pause_s", "convergence_s")
        },
        "late_iterations": interval(lambda r: r["machines"]["late"] / max(1, r["machines"]["iterations"])),
    }


def _speed_up(pairs: Sequence[tuple[Record, Record]]) -> Record:
    """How much longer pull takes than push-pull: for the same steps, and to the same accuracy."""
    found: Record = {"same_steps": ratio([p["wall_s"] for p, _ in pairs], [q["wall_s"] for _, q in pairs]).json()}
    for share in SHARES:
        times: list[tuple[float, float]] = []
        for pull, push in pairs:
            curves = [[(t, a) for _, t, a in curve(run)] for run in (pull, push)]
            first = statistics.fmean(points[0][1] for points in curves)
            last = min(points[-1][1] for points in curves)
            level = first + share * (last - first)
            times.append((first_at(curves[0], level), first_at(curves[1], level)))
        usable = [(a, b) for a, b in times if a > 0 and b > 0]
        if usable:
            found[f"to_{share:.0%}_of_the_gain"] = {
                "ratio": ratio([a for a, _ in usable], [b for _, b in usable]).json(),
                "seeds": len(usable),
                "seconds": [[round(a, 1), round(b, 1)] for a, b in times],
            }
    return found


# -- the simulator's forecast -----------------------------------------------------------------------------------------


def forecast(
    run: Record, machines: Sequence[EdgeMachine], *, groups: int, group_size: int, max_new_tokens: int, staleness: int
) -> Record:
    """Seconds a step of both modes, from the lengths and the training time of a co-located run and the machines' speeds
    alone. The simulator assigns calls by load, not by speed, and knows no network."""
    prompts = [
        TracePrompt(prompt_id=str(i), prompt_tokens=run["prompt_tokens"], lengths=tuple(lengths))
        for i, lengths in enumerate(run["lengths"])
    ]
    trace = Trace(name="co-located", cap_tokens=max_new_tokens, prompts=tuple(prompts))
    trainer = Latency(s_per_token=sum(s["train_s"] for s in run["steps"]) / sum(s["tokens"] for s in run["steps"]))
    replicas = tuple(
        ReplicaModel(c0_s=m.c0_s, b0=m.b0, max_running=m.max_running, prefill_tokens_per_s=m.prefill_tokens_per_s)
        for m in machines
    )
    scenario = Scenario(replicas=replicas, trainer=trainer)
    shape: Record = {"rollout_batch_size": groups, "group_size": group_size, "max_new_tokens": max_new_tokens}
    room = sum(m.max_running for m in machines)
    configs = {
        "pull": RolloutConfig(strategy=SyncConfig(), **shape),
        "push-pull": RolloutConfig(strategy=BoundedAsyncConfig(num_running=room), max_staleness=staleness, **shape),
    }
    steps = len(run["steps"])
    found: Record = {}
    for arm, config in configs.items():
        made = simulate(config.build_strategy(scenario.capabilities), trace.workload(), scenario, steps=steps)
        found[arm] = {"wall_s": sum(s.duration_s for s in made.steps)}
        lags = [entry for s in made.steps for entry in s.lag.tokens.items()]
        found[arm]["staleness_mean"] = sum(lag * n for lag, n in lags) / sum(n for _, n in lags)
    found["pull_over_push_pull"] = found["pull"]["wall_s"] / found["push-pull"]["wall_s"]
    return found


def markdown(summary: Record) -> str:
    """The table for ``benchmarks/LOG.md``."""
    arms = summary["arms"]

    def told(value: Sequence[float | None] | None, form: str = ".2f", scale: float = 1.0, unit: str = "") -> str:
        if value is None or value[0] is None:
            return "–"
        mean, half = value
        assert mean is not None
        return f"{mean * scale:{form}}" + ("" if half is None else f" ± {half * scale:{form}}") + unit

    last = max(map(int, arms["co-located"]["accuracy_by_step"]), default=0)
    half_way = sorted(map(int, arms["co-located"]["accuracy_by_step"]))[
        len(arms["co-located"]["accuracy_by_step"]) // 2
    ]
    rows: list[tuple[str, Callable[[Record], str]]] = [
        (f"accuracy after {step} steps", lambda a, s=str(step): told(a["accuracy_by_step"][s], ".3f"))  # type: ignore[misc]
        for step in (0, half_way, last)
    ]
    rows += [
        (f"seconds for {last} steps", lambda a: told(a["wall_s"], ".1f")),
        ("staleness of a token, mean", lambda a: told(a["staleness_mean"])),
        ("staleness, largest", lambda a: str(a["staleness_max"])),
        ("trainer waits for a batch", lambda a: told(a["trainer_idle"], ".0f", 100, " %")),
        ("a member has no call", lambda a: told(a.get("members_idle"), ".0f", 100, " %")),
        ("a place of a member has no call", lambda a: told(a.get("places_idle"), ".0f", 100, " %")),
        ("full weights, delta, on the wire (MB)", _bytes),
        ("all that members fetched (MB)", lambda a: told(a.get("wire_bytes"), ".1f", 1e-6)),
        ("to fetch and verify: mean, 95th of 100 (s)", lambda a: _two(a, "prepare_s")),
        ("engine stands still: mean, 95th of 100 (ms)", lambda a: _two(a, "pause_s", 1e3)),
        ("until the last member has them: mean, 95th of 100 (s)", lambda a: _two(a, "convergence_s")),
        ("iterations that ended late", lambda a: told(a.get("late_iterations"), ".1f", 100, " %")),
    ]
    lines = [f"| {len(summary['seeds'])} seeds | {' | '.join(arms)} |", "|---" * (len(arms) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(cell(arm) for arm in arms.values())} |" for name, cell in rows]
    return "\n".join(lines)


def _bytes(arm: Record) -> str:
    if "full_wire_bytes" not in arm:
        return "–"
    delta = arm["delta_wire_bytes"]
    return f"{arm['full_wire_bytes'] / 1e6:.2f}, {'–' if delta is None else f'{delta / 1e6:.2f}'}"


def _two(arm: Record, name: str, scale: float = 1.0) -> str:
    if name not in arm:
        return "–"
    return ", ".join(f"{arm[name][key][0] * scale:.2f}" for key in ("mean", "p95"))
