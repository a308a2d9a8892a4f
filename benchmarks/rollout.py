"""Strategies over the embedded engine, decoding for real, beside what the simulator says of them.

    OMP_NUM_THREADS=2 python benchmarks/rollout.py            # 20 minutes on a quiet machine
    OMP_NUM_THREADS=2 python benchmarks/rollout.py --small    # seconds, to see that it works
    OMP_NUM_THREADS=2 python benchmarks/rollout.py --trainer 0.2    # beside a trainer with devices of its own

The engine is measured first: prefill, weight swap, sending a call, and how long an iteration takes with B samples of
this load's mean context. Then all strategies roll out, in turns, a step each, so that what else the machine does hits
all alike, with lengths replayed from ``--lengths``, the same for all and others in each repeat. Every few turns,
steps of equal lengths tell how long iterations take below the driver under these very conditions. That, and nothing
from the strategies' runs, is what the simulator is told: once as the line c0 (1 + B / B0), once as the measured
times. Batches have so many groups that samples per batch are 2.4 B0, as in the published setup of APRIL (arXiv
2509.18521). Throughput is trained tokens per second of rollout and weight swap, training left out, from the first
step after the warm-up, over whole rounds.

With ``--trainer`` a training step is a pause that takes this share of the loop of ``sync``, by simulation, and counts;
strategies that generate meanwhile are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from engine import machine
from measures import config_of, fit, iteration_times, request, seconds
from replayed import (
    Rolling,
    Run,
    Setting,
    foretell,
    mean_context,
    read_lengths,
    swap,
    target_for,
    trained_length_drift,
)
from safetensors.torch import load_file
from workload import SHAPES, Load, make_model

from rollover.engine.embedded.core import EngineCore
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.rollout.config import RolloutConfig
from rollover.settings.schema import build
from rollover.settings.toml import Document
from rollover.sim.scenario import ReplicaModel
from rollover.sim.strategies import SimulatedRollout
from rollover.workload.trace import Replay, Trace, TracePrompt

HERE = Path(__file__).parent
LOAD_OF_B0 = 2.4
"""Samples per batch over B0."""
PROMPT_TOKENS = 16
TIMED_TURNS = 5
"""In which iterations are timed; the first is not counted."""
BOUND = 16
"""Staleness bound of all strategies that have one."""
Result = dict[str, Any]


# -- the engine --------------------------------------------------------------------------------------------------


def measure_engine(folder: Path, context: int, sizes: Sequence[int]) -> Result:
    """The engine by itself, before any rollout."""
    load = Load(
        name="rollout", model=str(folder), dtype="float32", prompts=[], num_new_tokens=[], max_running=128,
        max_context_tokens=2048,
    )  # fmt: skip
    times = iteration_times(load, list(sizes), context=context)
    many = 2048 // context
    one_s, many_s = prefill_time(load, 1, PROMPT_TOKENS), prefill_time(load, many, context)
    rate = (many * context - PROMPT_TOKENS) / (many_s - one_s)
    return {
        "context_tokens": context,
        "iteration_s": times,
        "fit": fit(times),
        "prefill_tokens_per_s": rate,
        "prefill_call_s": max(0.0, one_s - PROMPT_TOKENS / rate),
        "swap_s": asyncio.run(swap_time(load)),
        "call_s": asyncio.run(call_time(load, times)),
    }


def prefill_time(load: Load, num_prompts: int, num_tokens: int, repeats: int = 9) -> float:
    """Median seconds that an iteration with prefill takes longer than the next one, which has none."""
    core = EngineCore(Path(load.model), config_of(load))
    found = []
    for i in range(repeats):
        for k in range(num_prompts):
            core.add(request(f"p{i}.{k}", num_tokens, 3))
        with_prefill_s = seconds(core.step)
        found.append(with_prefill_s - seconds(core.step))
        while core.has_work:
            core.step()
    return statistics.median(found)


async def swap_time(load: Load, repeats: int = 7) -> float:
    """Median seconds of a weight swap from memory."""
    engine = EmbeddedEngine.from_folder(Path(load.model), config_of(load))
    tensors = load_file(Path(load.model) / "model.safetensors")
    found = []
    for version in range(repeats):
        start_s = time.perf_counter()
        await swap(engine, version, tensors)
        found.append(time.perf_counter() - start_s)
    await engine.close()
    return statistics.median(found)


async def call_time(load: Load, iteration_s: Mapping[int, float], repeats: int = 9) -> float:
    """Median seconds that sending a call takes, on the way to the engine: of a few and of many samples that resume with
    their caches, the time until each has a token, less that of an iteration."""
    engine = EmbeddedEngine.from_folder(Path(load.model), config_of(load))
    few, many = min(iteration_s), max(iteration_s)
    responses: dict[str, tuple[int, ...]] = {}

    async def one_token(name: str) -> None:
        async for chunk in engine.generate(request(name, PROMPT_TOKENS, response=responses.get(name, ()))):
            responses[name] = responses.get(name, ()) + chunk.token_ids
            if chunk.token_ids:
                return

    async def until_tokens_s(num_calls: int) -> float:
        start_s = time.perf_counter()
        await asyncio.gather(*(one_token(f"c{i}") for i in range(num_calls)))
        return time.perf_counter() - start_s - iteration_s[num_calls]

    await until_tokens_s(many)  # their prompts
    found = [(await until_tokens_s(many) - await until_tokens_s(few)) / (many - few) for _ in range(repeats)]
    await engine.close()
    return max(0.0, statistics.median(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedReplica(ReplicaModel):
    """A replica whose iterations take what was measured; the line stays what replicas are compared by."""

    iteration_table: tuple[tuple[int, float], ...]
    """Measured (samples, seconds) of an iteration, two or more by ascending samples."""

    def iteration_s(self, num_running: float) -> float:
        """Interpolated; flat below the first point, and beyond the last the last piece goes on."""
        table = self.iteration_table
        if num_running <= table[0][0]:
            return table[0][1]
        place = min(bisect_left(table, num_running, key=itemgetter(0)), len(table) - 1)
        (fewer, least_s), (more, most_s) = table[place - 1], table[place]
        return least_s + (most_s - least_s) * (num_running - fewer) / (more - fewer)


def models(measured: Result, times: Mapping[int, float]) -> dict[str, ReplicaModel]:
    """What the simulator is told: the line fitted to the iteration ``times``, and the times."""
    fitted = fit(dict(times))
    line = ReplicaModel(
        c0_s=fitted["c0_s"],
        b0=fitted["B0"],
        prefill_tokens_per_s=measured["prefill_tokens_per_s"],
        prefill_call_s=measured["prefill_call_s"],
        call_s=measured["call_s"],
        swap_pause_s=measured["swap_s"],
    )
    return {"line": line, "table": TimedReplica(**asdict(line), iteration_table=tuple(sorted(times.items())))}


def equal_lengths(samples: int, length: int) -> tuple[Setting, Trace]:
    """Steps in which so many samples run from the first iteration to the last."""
    prompt = TracePrompt(prompt_id="0", prompt_tokens=PROMPT_TOKENS, lengths=(length,) * samples)
    config = SimulatedRollout.of("sync", rollout_batch_size=1, group_size=samples, max_new_tokens=length)
    return Setting(name=f"{samples} of {length}", config=config), Trace(name="", cap_tokens=length, prompts=(prompt,))


def iteration_time(run: Run, measured: Result) -> float:
    """Seconds of an iteration in a run of ``equal_lengths``, without its first step, its prompt and the swaps."""
    apart_s = measured["prefill_call_s"] + PROMPT_TOKENS / measured["prefill_tokens_per_s"] + measured["swap_s"]
    window = run.after(1)
    return (window.seconds - len(window.steps) * apart_s) / (len(window.steps) * window.iterations)


# -- settings ----------------------------------------------------------------------------------------------------


def settings(batch: int, group: int, cap: int, has_trainer: bool = False) -> list[Setting]:
    """The first is what the others are compared with; ``rollover`` at the lag of another still wants its target. As
    packaged: whole groups, caches recomputed, the default bound."""

    def setting(name: str, strategy: str, keep: bool = True, lag_of: str = "", **options: Any) -> Setting:
        bound = {} if strategy == "sync" else {"max_staleness": BOUND}
        config = SimulatedRollout.of(
            strategy, rollout_batch_size=batch, group_size=group, max_new_tokens=cap, **bound | options,
        )  # fmt: skip
        return Setting(name=name, config=config, kv_on_update="keep" if keep else "recompute", lag_of=lag_of)

    num_samples = batch * group
    twice: dict[str, Any] = {"over_sampling_batch_size": 2 * batch}
    groups: dict[str, Any] = {"lag_target": 1.0}
    samples: dict[str, Any] = {"unit": "sample", "lag_target": 1.0}
    packaged: dict[str, Any] = {"max_staleness": RolloutConfig().max_staleness}
    if has_trainer:
        rivals = [setting(f"bounded_async, S = {bound}", "bounded_async", max_staleness=bound) for bound in (1, 2)]
        ours = [
            setting(
                f"rollover, overlapped, the lag of S = {bound}", "rollover", lag_of=rival.name, overlap=True, **groups
            )
            for bound, rival in zip((1, 2), rivals, strict=True)
        ]
        return [setting("sync", "sync"), *rivals, *ours]
    return [
        setting("sync", "sync"),
        setting("april, recompute", "april", keep=False, **twice),
        setting("april", "april", **twice),
        setting("april, as packaged", "april", keep=False, **twice, **packaged),
        setting("concurrency, C = NG", "concurrency", num_running=num_samples),
        setting("concurrency, C = 1.5 NG", "concurrency", num_running=3 * num_samples // 2),
        setting(
            "rollover, april's lag, recompute, groups", "rollover", keep=False, lag_of="april, recompute", **groups
        ),
        setting("rollover, april's lag, recompute", "rollover", keep=False, lag_of="april, recompute", **samples),
        setting("rollover, april's lag, groups", "rollover", lag_of="april", **groups),
        setting("rollover, april's lag", "rollover", lag_of="april", **samples),
        setting("rollover, lag 3", "rollover", **samples | {"lag_target": 3.0}),
        setting("rollover, as packaged", "rollover", keep=False, **groups, **packaged),
    ]


def aimed(
    chosen: Sequence[Setting], others: Sequence[Setting], trace: Trace, model: ReplicaModel, steps: int, warmup: int
) -> list[Setting]:
    """``rollover`` is to have the lag of one of the ``others``, in simulation."""
    workload = trace.workload()
    by_name = {setting.name: setting for setting in others}

    def aim(setting: Setting) -> Setting:
        if not setting.lag_of:
            return setting
        lag = foretell(by_name[setting.lag_of], workload, model, steps).after(warmup).lag.batch
        return target_for(lag, setting, workload, model, steps, warmup)

    return [aim(setting) for setting in chosen]


def beside_trainer(chosen: Sequence[Setting], share: float, trace: Trace, model: ReplicaModel) -> list[Setting]:
    """The settings, with a training step that takes ``share`` of the loop of the first of them, in simulation."""
    window = foretell(chosen[0], trace.workload(), model, 64).after(0)
    training_s = share / (1 - share) * window.seconds / len(window.steps)
    return [replace(setting, training_s=training_s) for setting in chosen]


# -- a repeat ----------------------------------------------------------------------------------------------------


def figures(run: Run, workload: Replay, setting: Setting, warmup: int) -> Result:
    window = run.after(warmup)
    return {
        "tokens_per_s": window.tokens_per_s,
        "seconds": window.seconds,
        "iterations": window.iterations,
        "lag": window.lag.batch,
        "lag_p95": window.lag.p95,
        "lag_max": window.lag.max,
        "length_drift": trained_length_drift(window, workload, setting.config),
        "prefilled_tokens": window.prefilled_tokens,
        "reprefilled_tokens": run.tokens.reprefilled,
        "wasted_tokens": sum(run.tokens.wasted.values()),
        "decoded_tokens": run.tokens.decoded,
    }


async def take_turns(
    chosen: Sequence[Setting], workload: Replay, folder: Path, measured: Result, args: argparse.Namespace
) -> tuple[dict[str, Result], dict[int, float]]:
    """Each setting once, and iteration times below the driver."""
    tensors = load_file(folder / "model.safetensors")
    weights = (tensors, {name: 0.999 * tensor for name, tensor in tensors.items()})
    length = 2 * (measured["context_tokens"] - PROMPT_TOKENS)
    equal = [equal_lengths(size, length) for size in measured["iteration_s"]]
    timed = [Rolling(setting, trace.workload(), folder, weights) for setting, trace in equal]
    runs = [Rolling(setting, workload, folder, weights) for setting in chosen]
    steps = args.warmup_steps + args.steps
    for turn in range(steps):
        for rolling in timed if turn % max(1, steps // TIMED_TURNS) == 0 else ():
            await rolling.step()
        for rolling in runs:
            await rolling.step()
    times = {r.setting.config.group_size: iteration_time(await r.close(), measured) for r in timed}
    found = {
        r.setting.name: {"measured": figures(await r.close(), workload, r.setting, args.warmup_steps)} for r in runs
    }
    return found, times


def foretell_all(record: Result, trace: Trace) -> Result:
    """The record with what the simulator says of each setting and repeat, told nothing but the measured times."""
    measured, steps = record["engine"], record["steps"]
    told = models(measured, {int(size): seconds for size, seconds in measured["iteration_in_rollout_s"].items()})
    for seed, runs in enumerate(record["repeats"]):
        workload = trace.workload(seed)
        for name, entry in runs.items():
            setting = recorded_setting(record["settings"][name])
            for who, model in told.items():
                run = foretell(setting, workload, model, steps["warmup"] + steps["counted"])
                entry[who] = figures(run, workload, setting, steps["warmup"])
    told_record = {"told": {name: asdict(model) for name, model in told.items()}}
    return record | {"engine": measured | told_record, "summary": summary(record["repeats"])}


def recorded_setting(entry: Result) -> Setting:
    """Read a setting of a record. Records of November 2026 have the options of all strategies beside the strategy."""
    table = dict(entry["config"])
    if isinstance(kind := table["strategy"], str):
        options = table.keys() - {field.name for field in fields(RolloutConfig)}
        table["strategy"] = {"kind": kind} | {
            key: value for key in options if (value := table.pop(key)) not in (None, False)
        }
    return Setting(
        name=entry["name"],
        config=build(RolloutConfig, Document(data=table, name=entry["name"])),
        kv_on_update=entry["kv_on_update"],
        training_s=entry.get("training_s", 0.0),
    )


def summary(repeats: Sequence[Mapping[str, Result]]) -> dict[str, Result]:
    """Over the repeats: gains over the first setting of the same repeat, measured and foretold, and means."""
    base, *_ = repeats[0]

    def gains(name: str, who: str) -> list[float]:
        return [r[name][who]["tokens_per_s"] / r[base][who]["tokens_per_s"] for r in repeats]

    def entry(name: str) -> Result:
        measured = gains(name, "measured")
        said = {who: statistics.fmean(gains(name, who)) for who in repeats[0][name] if who != "measured"}
        mean = {
            key: statistics.fmean(r[name]["measured"][key] for r in repeats) for key in repeats[0][name]["measured"]
        }
        gain = statistics.fmean(measured)
        return {
            "gain": gain,
            "gains": measured,
            "foretold": said,
            "measured_over_foretold": {who: gain / value for who, value in said.items()},
            "mean": mean,
        }

    return {name: entry(name) for name in repeats[0]}


def show(found: Mapping[str, Result]) -> None:
    said = " | ".join(f"{who:>5s} {'ratio':>5s}" for who in ("line", "table"))
    print(
        f"{'':40s} {'tok/s':>6s} {'gain':>5s} {'from..to':>10s} | {said} | lag {'mean':>5s} {'p95':>4s} {'max':>4s}"
        f" | {'waste':>5s} {'re-prefill':>10s} {'length':>7s}"
    )
    for name, entry in found.items():
        mean, said, ratio = entry["mean"], entry["foretold"], entry["measured_over_foretold"]
        spread = f"{min(entry['gains']):.2f}..{max(entry['gains']):.2f}"
        print(
            f"{name:40s} {mean['tokens_per_s']:6.0f} {entry['gain']:5.2f} {spread:>10s}"
            f" | {said['line']:5.2f} {ratio['line']:5.2f} | {said['table']:5.2f} {ratio['table']:5.2f} |"
            f"     {mean['lag']:5.2f} {mean['lag_p95']:4.1f} {mean['lag_max']:4.1f}"
            f" | {mean['wasted_tokens']:5.0f} {mean['reprefilled_tokens']:10.0f} {mean['length_drift']:+7.1%}"
        )


def run_all(args: argparse.Namespace, trace: Trace) -> Result:
    """All that is measured."""
    steps = args.warmup_steps + args.steps
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_model("3M" if args.small else args.model, Path(temporary) / "model", "float32")
        sizes = [int(size) for size in args.batch_sizes.split(",")]
        measured = measure_engine(folder, max(64, round(mean_context(trace))), sizes)
        before = models(measured, measured["iteration_s"])["table"]
        batch = args.batch or round(LOAD_OF_B0 * before.b0 / args.group)
        all_settings = settings(batch, args.group, trace.cap_tokens, has_trainer=args.trainer > 0)
        all_settings = beside_trainer(all_settings, args.trainer, trace, before)
        named = (all_settings[0].name, *args.only.split("; "))
        chosen = [s for s in all_settings if s.name in named or not args.only]
        chosen = aimed(chosen, all_settings, trace, before, 4 * steps, args.warmup_steps)
        workloads = [trace.workload(seed) for seed in range(args.repeats)]
        turns = [asyncio.run(take_turns(chosen, workload, folder, measured, args)) for workload in workloads]
    in_rollout_s = {size: statistics.fmean(times[size] for _, times in turns) for size in sizes}
    return {
        "command": sys.argv,
        "date": str(date.today()),
        "threads": torch.get_num_threads(),
        "machine": machine() | {"load_average": os.getloadavg()},
        "versions": {"torch": torch.__version__},
        "engine": measured | {"iteration_in_rollout_s": in_rollout_s},
        "batch": batch,
        "steps": {"warmup": args.warmup_steps, "counted": args.steps},
        "settings": {s.name: asdict(s) for s in chosen},
        "repeats": [runs for runs, _ in turns],
    }


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lengths",
        default=str(HERE / "lengths.json"),
        help="JSON: a list of lengths per prompt; or a packaged law, such as r1-16k",
    )
    parser.add_argument("--model", default="28M", choices=sorted(SHAPES), help="float32, random weights")
    parser.add_argument("--scale", type=float, default=3.0, help="divides the lengths")
    parser.add_argument("--group", type=int, default=4, help="samples per prompt")
    parser.add_argument("--batch", type=int, help="prompts per step; default: what makes 2.4 B0 samples")
    parser.add_argument("--batch-sizes", default="1,2,4,8,16,24,32,48", help="at which iterations are timed")
    parser.add_argument("--warmup-steps", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trainer", type=float, default=0.0, help="share of a separate trainer in the loop of sync")
    parser.add_argument("--only", default="", help="of the settings, these by name, parted by '; ', and sync")
    parser.add_argument("--small", action="store_true", help="tiny load: whether it works, not how fast it is")
    parser.add_argument("--out", type=Path, default=HERE / "results" / f"rollout-{date.today()}.json")
    parser.add_argument(
        "--again", type=Path, help="measure nothing: foretell this record again, with the simulator as it is"
    )
    return parser


def measured_and_foretold(args: argparse.Namespace) -> Result:
    if args.small:
        vars(args).update(scale=40.0, batch=2, group=2, batch_sizes="1,32", warmup_steps=1, steps=3, repeats=1)
    trace = read_lengths(args.lengths, args.group, args.scale, PROMPT_TOKENS)
    return foretell_all(json.loads(args.again.read_text()) if args.again else run_all(args, trace), trace)


def main() -> None:
    args = options().parse_args()
    record = measured_and_foretold(args)
    samples = record["batch"] * args.group
    b0 = record["engine"]["told"]["line"]["b0"]
    print(f"N = {record['batch']} prompts of G = {args.group}, N G / B0 = {samples / b0:.2f}")
    show(record["summary"])
    out = args.again or args.out
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"recorded in {out}")


if __name__ == "__main__":
    main()
