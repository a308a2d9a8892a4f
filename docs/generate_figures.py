"""Writes the measured figures of the pages from their records under ``benchmarks/results``.

``python docs/generate_figures.py`` replaces what stands between ``<!-- figures: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rollover.frontier.sweep import MeanOverSeeds

ROOT = Path(__file__).parent.parent
COMPARE = "benchmarks/results/compare-2026-11-28.json"
EQUAL_LAG = "benchmarks/results/rollout-lag-2026-11-28.json"
MAP = "benchmarks/results/map-2026-11-28b.json"
MAP_LAGS = (0.5, 1.0, 2.0)
ROUNDS = "benchmarks/results/rounds-2026-11-28.json"
LEARNING = "benchmarks/results/learning-quickstart-2026-11-27.json"
TOOL = "benchmarks/results/learning-tool-2026-11-28b.json"
AGENT = "benchmarks/results/learning-agent-2026-11-28.json"
TRL = "benchmarks/results/trl-tool-2026-11-28.json"
SOKOBAN = "benchmarks/results/learning-sokoban-2026-11-28.json"
APRIL = "benchmarks/results/april-2026-11-28.json"
LARGE = "benchmarks/results/memory-large-2026-11-28.json"
DOOR = "benchmarks/results/door-2026-11-28.json"
ACCURACY = "benchmarks/results/learning-algorithms-2026-11-28.json"
PLANNER = "benchmarks/results/planner-2026-11-28b.json"
SAMPLING = "benchmarks/results/sampling-check-2026-11-27.json"
GPU_GIB = 79.6
"""Memory of an H100 of 80 GB, as PyTorch reports it, less what its context takes."""
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def record(path: str) -> Any:
    return json.loads((ROOT / path).read_text())


def rollout() -> str:
    """Return the table of strategies on the embedded engine."""
    rows = record(COMPARE)["rollout"]["summary"]
    names = ("sync", "april, as packaged", "rollover, as packaged")
    runs = [rows[name] for name in names]
    speeds = " | ".join(f"{run['mean']['tokens_per_s']:,.0f}" for run in runs)
    gains = [f"{run['gain']:.2f}× ({min(run['gains']):.2f} to {max(run['gains']):.2f})" for run in runs[1:]]
    predicted = " | ".join(f"{run['foretold']['table']:.2f}×" for run in runs[1:])
    lags = " | ".join(f"{run['mean']['lag']:.2f} / {run['mean']['lag_max']:.0f}" for run in runs)
    return "\n".join(
        [
            "| one engine, long-tailed lengths, default settings | `sync` | `april`, the default | `rollover` |",
            "|---|---|---|---|",
            f"| trained tokens/s over rollout and weight update | {speeds} |",
            f"| speed-up over `sync`, with the range of two repeats | 1× | {' | '.join(gains)} |",
            f"| speed-up predicted by the simulator, given measured iteration times | 1× | {predicted} |",
            f"| lag of trained tokens, mean / max policy versions | {lags} |",
        ]
    )


def equal_lag() -> str:
    """Return the table of ``rollover`` over ``april`` at the lag of ``april``, by decoding; repeats are paired."""
    found = record(EQUAL_LAG)
    rows = []
    for caches, recompute in (("lost", ", recompute"), ("kept", "")):
        april, ours = f"april{recompute}", f"rollover, april's lag{recompute}, groups"
        runs = [found["summary"][name] for name in (april, ours)]
        speeds = [[turn[name]["measured"]["tokens_per_s"] for turn in found["repeats"]] for name in (april, ours)]
        ratio = MeanOverSeeds.of([mine / theirs for theirs, mine in zip(*speeds, strict=True)])
        predicted = runs[1]["foretold"]["table"] / runs[0]["foretold"]["table"]
        cells = " | ".join(f"{run['gain']:.2f}, {run['mean']['lag']:.2f}" for run in runs)
        rows.append(f"| {caches} | {cells} | {ratio.mean:.2f} ± {ratio.margin:.2f} | {predicted:.2f} |")
    head = "| caches | `april` over `sync`, lag | `rollover`, lag | `rollover` over `april` | predicted |"
    said = f"{len(found['repeats'])} repeats of {found['steps']['counted']} steps, 95 % intervals (`{EQUAL_LAG}`)."
    return "\n".join([head, "|---|---|---|---|---|", *rows, "", said])


def lag_map() -> str:
    """Return the table of which strategy leads where, one replica each, and whether it does with four."""
    found = record(MAP)
    rows, still = [], []
    for name, cell in found["cells"].items():
        preset, caches, trainer, replicas = name.split("/")
        if replicas == "1":
            rows.append(f"| `{preset}` | {caches} | {trainer} | {_leaders(cell)} | {cell['ceiling']:.1f} |")
            of_four = found["cells"][f"{preset}/{caches}/{trainer}/4"]["gains"]
            for lag in MAP_LAGS:
                fastest = max(of_four, key=lambda kind: of_four[kind][f"{lag:g}"]["mean"])
                still.append(fastest in [kind for _, kind in _fastest(cell, lag)])
    lags = " | ".join(f"at lag {lag:g}" for lag in MAP_LAGS)
    head = [f"| lengths | caches | trainer | {lags} | ceiling |", "|---" * (4 + len(MAP_LAGS)) + "|"]
    settings = found["settings"]
    length = f"{settings['steps']} steps, of which the first {settings['warmup']} are not counted"
    seeds = min(len(cell["seeds"]) for cell in found["cells"].values())
    four = f"With four replicas, the fastest is one of the two in {sum(still)} of {len(still)} cases."
    return "\n".join([*head, *rows, "", f"Seeds per cell: {seeds}; {length}. {four}", f"(`{MAP}`)"])


def _fastest(cell: dict[str, Any], lag: float) -> list[tuple[float, str]]:
    """Return the two largest gains at a lag, with the strategies that have them."""
    gains = [(round(of[f"{lag:g}"]["mean"], 2), kind) for kind, of in cell["gains"].items()]
    return sorted(gains, key=lambda pair: (-pair[0], pair[1] != "rollover"))[:2]


def _leaders(cell: dict[str, Any]) -> str:
    """Return the two fastest strategies at each lag, with their gains."""
    return " | ".join(", ".join(f"`{kind}` {gain:.2f}" for gain, kind in _fastest(cell, lag)) for lag in MAP_LAGS)


def clairvoyant() -> str:
    """Return the table of what no schedule exceeds."""
    rows = []
    for name, cell in record(MAP)["cells"].items():
        preset, caches, trainer, replicas = name.split("/")
        if (caches, trainer, replicas) == ("kept", "one", "1"):
            gains = " | ".join(f"{gain:.2f}" for gain in cell["clairvoyant"].values())
            rows.append(f"| `{preset}` | {gains} | {cell['ceiling']:.2f} |")
    return "\n".join(["| all lengths known, lag | 0.25 | 0.5 | 1 | 2 | ceiling |", "|---|---|---|---|---|---|", *rows])


def rounds() -> str:
    """Return the table of rounds in closed form and simulated."""
    rows = []
    for row in record(ROUNDS)["rounds"]:
        form, found = row["round"], row["simulated"]
        rows.append(
            f"| `{row['preset']}` | {form['num_batches']} | {form['ratio']:.2f}"
            f" | {form['iterations_per_batch']:,.0f} / {found['iterations_per_batch']:,.0f}"
            f" | {form['lag']:.2f} / {found['lag']:.2f} | {found['spread']:.2f} |"
        )
    head = "| workload | m | r | K, closed form / simulated | lag, closed form / simulated | spread of batch tokens |"
    return "\n".join([head, "|---|---|---|---|---|---|", *rows])


def learning(path: str) -> str:
    """Return the sentence that says what an experiment learns."""
    found = record(path)
    row, seeds = found["summary"]["all"], len(found["seeds"])
    least, most = (round(100 * row[key]) for key in ("least_gain", "most_gain"))
    gain = f"{least}" if least == most else f"{least} to {most}"
    before, after = (row[key][0] for key in ("before", "after"))
    over, mean = (f"Over {seeds} seeds", " on average") if seeds > 1 else ("With one seed", "")
    return f"{over}, accuracy rises by {gain} points, from {before:.2f} to {after:.2f}{mean}\n(`{path}`)."


def tool_in_trl() -> str:
    """Return the table of the calculator's task in TRL and here: seconds, accuracy, and seconds to an accuracy."""
    rows = []
    for seed, arms in enumerate(record(TRL)["seeds"]):
        for arm, found in arms.items():
            (first, _), *_, (last, _) = found["accuracy"].values()
            least, reached_s = found["to_accuracy"]
            rows.append(
                f"| {seed} | {'TRL 1.16' if arm == 'stock' else '`rollover train`'} | {found['marks_s'][-1]:.0f}"
                f" | {found['rollout_s']:.0f} | {first:.2f} | {last:.2f} | {least:.2f} after {reached_s:.0f} s |"
            )
    head = "| seed | | seconds of training | of which rollouts | accuracy before | after | reached by both |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *rows])


def sampling() -> str:
    """Return the table of what the sampling check finds."""
    found = {name: row for name, row in record(SAMPLING).items() if name != "seconds"}
    expected = found["honest"]["expected_tail"]
    head = (
        f"| the engine does | surprise, standard deviations | tokens of the tail, {expected:.0f} expected | refused |"
    )
    rows = [f"| {name} | {row['z']:+.1f} | {row['tail']:.0f} | {row['refused']:.0%} |" for name, row in found.items()]
    return "\n".join([head, "|---|---|---|---|", *rows])


def april() -> str:
    """Return APRIL's table of gains, published and simulated."""
    found = record(APRIL)
    published = [gain - 1 for rows in found["published"].values() for gains in rows.values() for gain in gains]
    half = len(published) // 2
    grpo, dapo = (f"+{min(part):.0%} to +{max(part):.0%}" for part in (published[:half], published[half:]))

    def gain(row: dict[str, Any], key: str) -> str:
        mean, margin = row[key]
        return f"{mean - 1:+.0%} ± {margin:.0%}"

    rows = [
        f"| `{row['law']}` | {row['algorithm'].upper()}{row['prompts'] and ', ' + row['prompts']}"
        f" | {row['filtered']:.0%}"
        f" | {grpo if row['algorithm'] == 'grpo' else dapo} | {gain(row, 'decoded')} | {gain(row, 'trained')}"
        f" | {gain(row, 'ours over released')} |"
        for row in found["rows"]
    ]
    head = "| lengths | algorithm and prompts | filtered | published | decoded | trained | ours, trained |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *rows])


def large() -> str:
    """Return the table of what training large models takes."""
    rows = []
    for row in record(LARGE)["rows"]:
        machine = f"{row['machine_gib']:.0f} GiB" if row["machine_gib"] else "—"
        rows.append(
            f"| {row['model']} | {row['way']} | {row['gpu_gib']:.1f} GiB | {machine} |"
            f" {'yes' if row['gpu_gib'] < GPU_GIB else 'no'} |"
        )
    head = "| model | trained | on the GPU | in the machine | fits a GPU of 80 GB |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def door() -> str:
    """Return what a request and a waiting program cost."""
    found = record(DOOR)
    rows = [
        f"| `{client}` | {row['door_ms']:.1f} ms | {row['echo_ms']:.1f} ms | {row['ratio']:.1f} |"
        for client, row in found["requests"].items()
    ]
    waits, programs = found["connections"], found["programs"]
    rows.append(
        f"| {waits['number']:,} connections that wait together | {waits['door_ms']:.1f} ms | {waits['echo_ms']:.1f} ms"
        f" | {waits['ratio']:.1f} |"
    )
    kib = f"{waits['kib_each']:.0f}"
    plain, httpx, openai = (f"{programs[f'{name}_mib']:.0f}" for name in ("plain", "httpx", "openai"))
    return "\n".join(
        [
            "| processor time of a request, client included | the door | an echo | ratio |",
            "|---|---|---|---|",
            *rows,
            "",
            f"While it waits, a program that needs nothing but Python takes {plain} MiB with that process, one with"
            f" `httpx` {httpx} MiB\nand one with `openai` {openai} MiB, and the run takes {kib} KiB for it"
            f"\n(`benchmarks/door.py`, `{DOOR}`).",
        ]
    )


def accuracy(path: str) -> str:
    """Return the table of schedules and algorithms: final accuracy, and differences from ``sync`` paired by seed."""
    seeds = record(path)["seeds"]

    def final(seed: dict[str, Any], name: str) -> float:
        return list(seed[name]["accuracy"].values())[-1]

    def curve(seed: dict[str, Any], name: str) -> float:
        first, *inner, last = seed[name]["accuracy"].values()
        return ((first + last) / 2 + sum(inner)) / (len(inner) + 1)

    def difference(name: str, figure: Callable[[dict[str, Any], str], float]) -> str:
        sync = f"sync-{name.split('-')[1]}"
        if name == sync:
            return ""
        found = MeanOverSeeds.of([100 * (figure(seed, name) - figure(seed, sync)) for seed in seeds])
        return f"{found.mean:+.1f} ± {found.margin:.1f}"

    rows = []
    for name in sorted(seeds[0], key=lambda n: (n.split("-")[1], ["sync", "april", "rollover"].index(n.split("-")[0]))):
        strategy, algorithm = name.split("-")
        mean = sum(final(seed, name) for seed in seeds) / len(seeds)
        tokens = sum(max(seed[name]["decoded_tokens"].values()) for seed in seeds) / len(seeds)
        rows.append(
            f"| {algorithm.upper()} | `{strategy}` | {mean:.3f} | {difference(name, final)}"
            f" | {difference(name, curve)} | {tokens / 1e3:,.0f} k |"
        )
    head = "| algorithm | strategy | final accuracy | points over `sync` | over the whole curve | decoded tokens |"
    said = f"{len(seeds)} seeds, paired, 95 % intervals (`{path}`)."
    return "\n".join([head, "|---|---|---|---|---|---|", *rows, "", said])


def planner() -> str:
    """Return the table of how long the planner takes."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in record(PLANNER)["timings"]:
        found.setdefault((row["devices"], row["types"]), []).append(row)
    types = {1: ", one type", 2: ", two types", 4: ""}
    bounds = [row["max_staleness"] for row in next(iter(found.values()))]

    def cells(rows: list[dict[str, Any]], key: str) -> str:
        return " | ".join(f"{row[key]:.1f}" for row in rows)

    rows = [
        f"| {devices:,}{types[kinds]} | {cells(of, 'cpu_s')} | {cells(of, 'plan_cpu_s')} |"
        for (devices, kinds), of in found.items()
    ]
    head = " | ".join(f"{what}, η = {bound}" for what in ("phase 1", "plan") for bound in bounds)
    return "\n".join([f"| devices | {head} |", "|---|" + "---|" * 2 * len(bounds), *rows])


FIGURES: dict[str, Callable[[], str]] = {
    "rollout": rollout,
    "equal_lag": equal_lag,
    "lag_map": lag_map,
    "clairvoyant": clairvoyant,
    "rounds": rounds,
    "learning": partial(learning, LEARNING),
    "tool": partial(learning, TOOL),
    "agent": partial(learning, AGENT),
    "sokoban": partial(learning, SOKOBAN),
    "tool_in_trl": tool_in_trl,
    "sampling": sampling,
    "door": door,
    "april": april,
    "accuracy": partial(accuracy, ACCURACY),
    "planner": planner,
    "large": large,
}
PAGES = (
    "README.md",
    "docs/engines.md",
    "docs/how-to/agents.md",
    "docs/how-to/environments.md",
    "docs/how-to/many-gpus.md",
    "docs/index.md",
    "docs/planner.md",
    "docs/quickstart.md",
    "docs/simulator.md",
    "docs/strategies.md",
    "docs/theory.md",
)


def render(page: str) -> str:
    """Return a page with its figures as their records have them."""
    return BLOCK.sub(lambda m: f"{m[1]}{FIGURES[m[2]]()}\n{m[4]}", (ROOT / page).read_text())


if __name__ == "__main__":
    for each in PAGES:
        (ROOT / each).write_text(render(each))
