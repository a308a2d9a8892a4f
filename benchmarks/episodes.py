"""What tools cost: strategies on episodes whose environment answers at once, after 100 ms and after a second.

    OMP_NUM_THREADS=1 python benchmarks/episodes.py --out benchmarks/results/episodes-DATE.json   # ten minutes

The same episodes are decoded for real, by the driver over the embedded engine with tools that sleep, and simulated:
over a model of that engine, and at the size of a real run. Engines have as many slots as a batch has samples, and
`april` has twice as many samples in flight. Utilisation is the mean of running samples over slots. What is asked: a
tool of 100 ms leaves `april` nine tenths of its utilisation, since a sample whose environment acts holds no slot. How
many samples in flight that takes is foretold by Little's law and simulated (`--part in-flight`, a minute).
`--part simulated` repeats what is simulated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from engine import machine
from measures import fit, iteration_times
from replayed import Rolling, Setting, foretell
from safetensors.torch import load_file
from workload import Load, make_model

from rollover.sim.result import Window
from rollover.sim.scenario import ReplicaModel, Turns
from rollover.sim.strategies import SimulatedRollout
from rollover.workload.base import Workload
from rollover.workload.law import Generator, LengthLaw
from rollover.workload.source import preset

TOOL_S = (0.0, 0.1, 1.0)
TIMES = (2, 3, 4)
"""Samples in flight at the beginning of a round of `april`, in multiples of the slots."""
OBSERVED = 12
SHORT = LengthLaw(median_tokens=160, sigma=0.8, icc=0.5, loop_probability=0.0, cap_tokens=512, min_tokens=4)


def settings(batch: int, group: int, cap: int) -> list[Setting]:
    def setting(name: str, **options: Any) -> Setting:
        config = SimulatedRollout.of(
            name, rollout_batch_size=batch, group_size=group, max_new_tokens=2 * cap, **options
        )
        return Setting(name=name, config=config, max_running=batch * group)

    twice: dict[str, Any] = {"max_staleness": 8, "over_sampling_batch_size": 2 * batch}
    return [setting("sync"), setting("april", **twice), setting("rollover", max_staleness=8, lag_target=1.0)]


def figures(window: Window, slots: int) -> dict[str, float]:
    return {
        "tokens_per_s": window.tokens_per_s,
        "utilisation": window.mean_running / slots,
        "lag_of_tokens": window.lag.token,
        "lag_of_groups": window.lag.group,
        "lag_of_batches": window.lag.batch,
        "most_lag": window.lag.max,
    }


def simulated(workload: Workload, model: ReplicaModel, turn: int, shape: tuple[int, int], steps: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for setting in settings(*shape, workload.cap):
        for tool_s in TOOL_S:
            turns = Turns(tokens=turn, answer_s=tool_s, observed_tokens=OBSERVED)
            window = foretell(setting, workload, model, steps, turns).after(steps // 5)
            found.setdefault(setting.name, {})[f"{tool_s:g}"] = figures(window, setting.max_running)
    return found


def at_size() -> dict[str, Any]:
    large = ReplicaModel(c0_s=0.012, b0=108.0, prefill_tokens_per_s=1600 / 0.012)
    return simulated(Generator(preset("r1-16k"), 0), large, 256, (32, 8), 40)


def num_running(in_flight: float, slots: int, turn_s: Callable[[float], float], tool_s: float) -> float:
    """Return how many of the samples in flight run, by Little's law: R = M T(R) / (T(R) + Z), and at most the slots."""
    least, most = 0.0, float(slots)
    for _ in range(50):
        running = (least + most) / 2
        fewer = running * (turn_s(running) + tool_s) > in_flight * turn_s(running)
        least, most = (least, running) if fewer else (running, most)
    return least


def in_flight(
    workload: Generator, model: ReplicaModel, turn: int, shape: tuple[int, int], tool_s: float
) -> dict[str, Any]:
    """Return the share of its utilisation that `april` keeps with a tool, for several numbers of samples in flight. In
    a round they fall from ``times`` times the slots to one time less, since a batch has as many samples as slots."""
    slots = shape[0] * shape[1]
    lengths = [length for i in range(500) for length in workload.group_lengths(i, shape[1])]
    tokens = sum(lengths) / sum(-(-length // turn) for length in lengths)

    def turn_s(running: float) -> float:
        return tokens * model.c0_s * (1 + running / model.b0)

    found: dict[str, Any] = {"tokens_of_a_turn": tokens, "turn_s": turn_s(slots), "tool_s": tool_s}
    for times in TIMES:
        options: dict[str, Any] = {"max_staleness": 8, "over_sampling_batch_size": times * shape[0]}
        config = SimulatedRollout.of(
            "april", rollout_batch_size=shape[0], group_size=shape[1], max_new_tokens=2 * workload.cap, **options
        )
        setting = Setting(name="april", config=config, max_running=slots)
        turns = (Turns(tokens=turn, answer_s=seconds, observed_tokens=OBSERVED) for seconds in (0.0, tool_s))
        plain, slow = (foretell(setting, workload, model, 100, one).after(20).mean_running for one in turns)
        law = [num_running(slots * (times - part / 20), slots, turn_s, tool_s) / slots for part in range(21)]
        found[f"{times}"] = {"kept": slow / plain, "law": sum(law) / len(law), "law_at_the_end": law[-1]}
    return found


def mean_context(turn: int) -> int:
    """Return the tokens that a sample has in the cache, mean over the decoded ones: iterations are timed at these."""
    lengths = [length for i in range(500) for length in Generator(SHORT, 0).group_lengths(i, 4)]
    read = (1 + OBSERVED / turn) * sum(n * (n + 1) / 2 for n in lengths) / sum(lengths)
    return round(SHORT.prompt_tokens + read)


async def decoded(folder: Path, turn: int, shape: tuple[int, int], steps: int) -> dict[str, Any]:
    """One setting and tool after another, since tools would go on while others take a step."""
    weights, found = [load_file(folder / "model.safetensors")], dict[str, Any]()
    for setting in settings(*shape, SHORT.cap_tokens):
        for tool_s in TOOL_S:
            turns = Turns(tokens=turn, answer_s=tool_s, observed_tokens=OBSERVED)
            rolling = Rolling(setting, Generator(SHORT, 0), folder, weights, turns)
            for _ in range(steps):
                await rolling.step()
            window = (await rolling.close()).after(steps // 5)
            found.setdefault(setting.name, {})[f"{tool_s:g}"] = figures(window, setting.max_running)
    return found


def kept(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the share of the utilisation without a tool that is left with one."""
    return {
        name: {tool: row["utilisation"] / rows["0"]["utilisation"] for tool, row in rows.items()}
        for name, rows in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--part", choices=("all", "in-flight", "simulated"), default="all")
    options = parser.parse_args()
    shape, turn = (4, 4), 64
    if options.part != "all":  # over the engine of the record
        line = json.loads((Path(__file__).parent / "results/episodes-2026-11-28.json").read_text())["engine"]
        small = ReplicaModel(c0_s=line["c0_s"], b0=line["B0"])
        found = (
            in_flight(Generator(SHORT, 0), small, turn, shape, 0.1)
            if options.part == "in-flight"
            else {"simulated": simulated(Generator(SHORT, 0), small, turn, shape, 100), "simulated at size": at_size()}
        )
        record = {"command": sys.argv, "date": str(date.today()), "machine": machine(), "engine": line, **found}
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(found, indent=1))
        return
    with tempfile.TemporaryDirectory() as name:
        folder, context = Path(name), mean_context(turn)
        make_model("3M", folder, "float32")
        load = Load(
            name="episodes", model=name, dtype="float32", prompts=[], num_new_tokens=[], max_running=32,
            max_context_tokens=1024,
        )  # fmt: skip
        line = {**fit(iteration_times(load, [1, 4, 8, 16], context=context)), "context_tokens": context}
        small = ReplicaModel(c0_s=line["c0_s"], b0=line["B0"])
        found = {
            "decoded": asyncio.run(decoded(folder, turn, shape, options.steps)),
            "simulated": simulated(Generator(SHORT, 0), small, turn, shape, 100),
        }
    found["simulated at size"] = at_size()
    record = {"command": sys.argv, "date": str(date.today()), "machine": machine(), "engine": line, **found}
    record["kept"] = {part: kept(rows) for part, rows in found.items()}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    for part, rows in found.items():
        for strategy, by_tool in rows.items():
            for tool, row in by_tool.items():
                shown = " ".join(f"{key} {value:.3f}" for key, value in row.items())
                print(f"{part}: {strategy} {tool} s: {shown}")


if __name__ == "__main__":
    main()
