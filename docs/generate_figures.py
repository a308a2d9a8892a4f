"""Writes the measured figures of the pages from their records under ``benchmarks/results``.

``python docs/generate_figures.py`` replaces what stands between ``<!-- figures: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rollover.frontier.sweep import MeanOverSeeds

ROOT = Path(__file__).parent.parent
COMPARE = "benchmarks/results/compare-2026-11-28.json"
EQUAL_LAG = "benchmarks/results/rollout-lag-*.json"
MAP = "benchmarks/results/map-2026-11-29.json"
MAP_LAGS = (0.5, 1.0, 2.0)
ROUNDS = "benchmarks/results/rounds-2026-11-28.json"
THEORY = "benchmarks/results/theory-2026-11-28.json"
PREFILL = "benchmarks/results/prefill-2026-11-28.json"
KILLS = "benchmarks/results/kills-2026-11-26.json"
QUICKSTART = "benchmarks/results/quickstart-2026-11-28.json"
LEARNING = "benchmarks/results/learning-quickstart-2026-11-27.json"
TOOL = "benchmarks/results/learning-tool-2026-11-28b.json"
AGENT = "benchmarks/results/learning-agent-2026-11-28.json"
TRL = "benchmarks/results/trl-tool-2026-11-28.json"
SOKOBAN = "benchmarks/results/learning-sokoban-2026-11-28.json"
APRIL = "benchmarks/results/april-2026-11-28.json"
LARGE = "benchmarks/results/memory-large-2026-11-28.json"
TURNS = "benchmarks/results/turns-2026-11-29.json"
DOOR = "benchmarks/results/door-2026-11-28.json"
ACCURACY = "benchmarks/results/learning-algorithms-2026-11-28.json"
SOKOBAN_SCHEDULES = "benchmarks/results/learning-sokoban-schedules-2026-11-28.json"
DRAWN = {"accuracy": ACCURACY, "accuracy-sokoban": SOKOBAN_SCHEDULES}
"""Pictures of accuracy, and the records that `benchmarks/learning_figure.py` draws them from."""
PUBLISHED_POINTS = 2.1
"""Gain of accuracy that APRIL publishes."""
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
            f"| speed-up over `sync`, with the range of {len(runs[0]['gains'])} repeats | 1× | {' | '.join(gains)} |",
            f"| speed-up predicted by the simulator, given measured iteration times | 1× | {predicted} |",
            f"| lag of trained tokens, mean / max policy versions | {lags} |",
        ]
    )


def with_margin(found: MeanOverSeeds, digits: int = 2, sign: str = "") -> str:
    """Return a mean and half of its 95 % interval, which one value does not have."""
    margin = "" if found.margin is None else f" ± {found.margin:.{digits}f}"
    return f"{found.mean:{sign}.{digits}f}{margin}"


def equal_lag() -> str:
    """Return the table of ``rollover`` over ``april`` at the lag of ``april``, by decoding; repeats are paired."""
    rows, said = [], []
    for path in sorted(ROOT.glob(EQUAL_LAG)):
        found = json.loads(path.read_text())
        command = found["command"]
        lengths = f"`{command[command.index('--lengths') + 1]}`" if "--lengths" in command else "recorded"
        for caches, recompute in (("lost", ", recompute"), ("kept", "")):
            names = f"april{recompute}", f"rollover, april's lag{recompute}, groups"
            runs = [found["summary"][name] for name in names]
            speeds = [[turn[name]["measured"]["tokens_per_s"] for turn in found["repeats"]] for name in names]
            ratio = MeanOverSeeds.of([mine / theirs for theirs, mine in zip(*speeds, strict=True)])
            predicted = runs[1]["foretold"]["table"] / runs[0]["foretold"]["table"]
            cells = " | ".join(f"{run['gain']:.2f}, {run['mean']['lag']:.2f}" for run in runs)
            again = " and ".join(f"{run['mean']['reprefilled_tokens']:,.0f}" for run in runs)
            rows.append(f"| {lengths} | {caches} | {cells} | {with_margin(ratio)} | {predicted:.2f} | {again} |")
        steps = found["steps"]["counted"]
        group = found["settings"]["april"]["config"]["group_size"]
        load = found["batch"] * group / found["engine"]["told"]["line"]["b0"]
        said.append(
            f"{lengths.capitalize()} lengths: {len(found['repeats'])} repeats of {steps} steps,"
            f" {load:.1f} *B0* samples a batch\n(`{path.relative_to(ROOT)}`)"
        )
    head = (
        "| lengths | caches | `april` over `sync`, lag | `rollover`, lag | `rollover` over `april` | predicted"
        " | tokens prefilled again, `april` and `rollover` |"
    )
    return "\n".join([head, "|---" * 7 + "|", *rows, "", "; ".join(said) + ".\n95 % intervals."])


def lag_map() -> str:
    """Return the table of which strategy leads where, one replica each, and whether it does with four."""
    found = record(MAP)
    rows, still, certain = [], [], []
    for name, cell in found["cells"].items():
        preset, caches, trainer, replicas = name.split("/")
        if replicas == "1":
            rows.append(f"| `{preset}` | {caches} | {trainer} | {_leaders(cell)} | {cell['ceiling']:.1f} |")
            of_four = found["cells"][f"{preset}/{caches}/{trainer}/4"]["gains"]
            for lag in MAP_LAGS:
                first, second = _fastest(cell, lag)
                fastest = max(of_four, key=lambda kind: of_four[kind][f"{lag:g}"]["mean"])
                still.append(fastest in (first, second))
                ratios = [
                    seed["gains"][first][f"{lag:g}"] / seed["gains"][second][f"{lag:g}"] for seed in cell["seeds"]
                ]
                lead = MeanOverSeeds.of(ratios)
                certain.append(lead.margin is not None and lead.mean - lead.margin > 1)
    lags = " | ".join(f"at lag {lag:g}" for lag in MAP_LAGS)
    head = [f"| lengths | caches | trainer | {lags} | ceiling |", "|---" * (4 + len(MAP_LAGS)) + "|"]
    settings = found["settings"]
    length = f"{settings['steps']} steps, of which the first {settings['warmup']} are not counted"
    seeds = sorted({len(cell["seeds"]) for cell in found["cells"].values()})
    said = f"Seeds per cell: {' or '.join(map(str, seeds))}; {length}."
    if seeds[-1] > 1:
        said += " ± is half of a 95 % interval."
    if seeds[0] > 1:
        said += f"\nIn {sum(certain)} of {len(certain)} cases the first leads by more than the interval of their ratio."
    four = (
        f"With four replicas, the fastest strategy is one of the two named here in {sum(still)} of {len(still)} cases."
    )
    return "\n".join([*head, *rows, "", said, four, f"(`{MAP}`)"])


def _fastest(cell: dict[str, Any], lag: float) -> list[str]:
    """Return the strategies with the two largest gains at a lag."""
    gains = {kind: round(of[f"{lag:g}"]["mean"], 2) for kind, of in cell["gains"].items()}
    return sorted(gains, key=lambda kind: (-gains[kind], kind != "rollover"))[:2]


def _leaders(cell: dict[str, Any]) -> str:
    """Return the two fastest strategies at each lag, with their gains."""

    def gain(kind: str, lag: float) -> str:
        return f"`{kind}` {with_margin(MeanOverSeeds(**cell['gains'][kind][f'{lag:g}']))}"

    return " | ".join(", ".join(gain(kind, lag) for kind in _fastest(cell, lag)) for lag in MAP_LAGS)


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


def kappa() -> str:
    """Return the table of the constants of the length laws."""
    found = record(THEORY)
    rows = []
    for name, model in found["models"].items():
        own, sibling = model["kappa_own"], model["kappa_sibling"]
        rows.append(
            f"| `{name}` | {model['mean_tokens']:,.0f} | {model['at_cap']:.1%} | {own:,.0f} | {sibling:,.0f}"
            f" | {own + sibling:,.0f} | {sibling / (own + sibling):.0%} |"
        )
    head = "| workload | mean tokens | reach the cap | own | sibling | kappa | share of siblings |"
    said = f"{found['settings']['groups']:,} groups of {found['settings']['G']} each (`{THEORY}`)."
    return "\n".join([head, "|---|---|---|---|---|---|---|", *rows, "", said])


def _products(found: Any, name: str, strategy: str) -> dict[str, float]:
    """Return lag K over kappa of the runs of a strategy, by setting."""
    constant = found["models"][name]["kappa_own"] + found["models"][name]["kappa_sibling"]
    return {run["label"]: run["lag"] * run["iterations"] / constant for run in found["runs"][name][strategy]}


def curve() -> str:
    """Return the table of lag times K over kappa."""
    found = record(THEORY)
    rows = {name: _products(found, name, "april") | _products(found, name, "concurrency") for name in found["runs"]}
    labels = list(next(iter(rows.values())))
    cells = [f"| `{name}` | {' | '.join(f'{of[label]:.2f}' for label in labels)} |" for name, of in rows.items()]
    return "\n".join([f"| *lag K / kappa* | {' | '.join(labels)} |", "|---" * (len(labels) + 1) + "|", *cells])


def agreement() -> str:
    """Return the table of the largest differences between closed forms and simulated runs."""
    found = record(THEORY)
    settings = found["settings"]
    samples = settings["N"] * settings["G"]

    def runs(*kinds: str) -> list[dict[str, Any]]:
        return [run for of in found["runs"].values() for kind in kinds for run in of[kind]]

    def size(run: dict[str, Any]) -> float:
        return float(run["label"].split()[-1])

    def time(run: dict[str, Any]) -> float:
        tokens = samples * run["mean_length"]
        return (run["iterations"] + tokens / settings["B0"] + run["prefill"]) * run["tokens_per_c0"] / tokens

    heads = [abs(run["head_lag"] - (size(run) - 1)) for run in runs("april")]
    iterations = [run["iterations"] * size(run) / (samples * run["mean_length"]) for run in runs("concurrency")]
    products = [value for name in found["runs"] for value in _products(found, name, "concurrency").values()]
    lengths = [
        run["mean_length"] / of["sync"][0]["mean_length"]
        for of in found["runs"].values()
        for kind in ("april", "concurrency")
        for run in of[kind]
    ]
    rows = {
        "T = c0 (K + X/B0) + P with `sync`, `april` and `concurrency`": map(time, runs("sync", "april", "concurrency")),
        "K = X/C with `concurrency`": iterations,
        "lag · K = kappa with `concurrency`": products,
        "mean trained length of `april` and `concurrency` = that of `sync`": lengths,
    }
    cells = [f"| {words} | {max(abs(value - 1) for value in values):.1%} |" for words, values in rows.items()]
    return "\n".join(
        [
            "| statement | largest difference |",
            "|---|---|",
            *cells,
            f"| head lag = r − 1 with `april` | {max(heads):.2f} versions |",
            "",
            f"Runs of {settings['steps']} steps, of which {settings['warm_up']} are not counted (`{THEORY}`).",
        ]
    )


def prefill() -> str:
    """Return the table of what knowing the rate of prefill is worth."""
    (study,) = [study for study in record(PREFILL)["studies"] if study["unit"] == "sample"]
    rows = []
    for engine in study["engines"]:
        gains = " | ".join(f"{told['gain']['mean']:.2f}" for told in engine["told"])
        rows.append(f"| {engine['engine']:,g} | {gains} |")
    told = [float(cell["told"]) for cell in study["engines"][0]["told"]]
    head = f"| | {' | '.join('ignored' if rate == math.inf else f'{rate:,g}' for rate in told)} |"
    return "\n".join([head, "|---" * (len(told) + 1) + "|", *rows, "", f"(`{PREFILL}`)"])


def kills() -> str:
    """Return the sentence on runs that were killed."""
    found = record(KILLS)
    strategies = len({case["strategy"] for case in found["cases"]})
    return (
        f"In {found['kills']} kills at random moments, in runs of {strategies} strategies, nothing was lost and nothing"
        f" was trained twice\n([record]({KILLS}))."
    )


def quickstart() -> str:
    """Return what the quickstart prints."""
    found = record(QUICKSTART)
    return "\n".join(["```console", f"$ {found['command']}", *found["console"], "```", "", f"(`{QUICKSTART}`)"])


def quickstart_lines() -> str:
    """Return two lines that the quickstart prints: a step and an evaluation."""
    found = record(QUICKSTART)["console"]
    lines = [next(line for line in found if text in line) for text in ("] step ", "eval at step 15")]
    return "\n".join(["```", *lines, "```"])


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

    def final(run: dict[str, Any]) -> float:
        return list(run["accuracy"].values())[-1]

    def curve(run: dict[str, Any]) -> float:
        first, *inner, last = run["accuracy"].values()
        return ((first + last) / 2 + sum(inner)) / (len(inner) + 1)

    def points(name: str, figure: Callable[[dict[str, Any]], float]) -> MeanOverSeeds:
        """Return by how many points a schedule is above ``sync``."""
        sync = f"sync-{name.split('-')[1]}"
        return MeanOverSeeds.of([100 * (figure(seed[name]) - figure(seed[sync])) for seed in seeds])

    def mean(name: str, figure: Callable[[dict[str, Any]], float]) -> float:
        return sum(figure(seed[name]) for seed in seeds) / len(seeds)

    rows, intervals = [], []
    for name in sorted(seeds[0], key=lambda n: (n.split("-")[1], ["sync", "april", "rollover"].index(n.split("-")[0]))):
        strategy, algorithm = name.split("-")
        over, differences = "|", [points(name, figure) for figure in (final, curve)]
        if strategy != "sync":
            intervals.append(differences[0])
            over = " | ".join(with_margin(difference, 1, "+") for difference in differences)
        tokens = mean(name, lambda run: max(run["decoded_tokens"].values()))
        before = mean(name, lambda run: next(iter(run["accuracy"].values())))
        rows.append(
            f"| {algorithm.upper()} | `{strategy}` | {before:.3f}, {mean(name, final):.3f} | {over}"
            f" | {tokens / 1e3:,.0f} k |"
        )
    said = f"{len(seeds)} seeds, paired, 95 % intervals (`{path}`)."
    if len(seeds) > 1:
        hold = [sum(abs(i.mean - gain) <= (i.margin or 0) for i in intervals) for gain in (0, PUBLISHED_POINTS)]
        said += (
            f"\nIntervals of the final accuracy that hold 0: {hold[0]} of {len(intervals)}; that hold the"
            f" {PUBLISHED_POINTS} points that APRIL publishes: {hold[1]} of {len(intervals)}."
        )
    head = (
        "| algorithm | strategy | accuracy before, after | points over `sync` | over the whole curve | decoded tokens |"
    )
    return "\n".join([head, "|---" * 6 + "|", *rows, "", said])


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


def turns() -> str:
    """Return the table of the prefill that turns cost."""
    labels = {"embedded": "embedded", "vllm": "vLLM, blocks of 128 tokens", "sglang": "SGLang"}
    rows = []
    for name, found in record(TURNS)["engines"].items():
        first, later = found["first turns"], found["later turns"]
        prefilled = " | ".join(f"{one['prefilled_tokens_per_turn']:.0f}" for one in (first, later))
        rows.append(f"| {labels[name]} | {prefilled} | {later['found_of_findable']:.1%} |")
    sizes = [f"{one['sent_tokens_per_turn']:.0f} sent, {one['new_tokens_per_turn']:.0f} new" for one in (first, later)]
    head = f"| prefilled tokens | first turn ({sizes[0]}) | later turn ({sizes[1]}) | found of what a cache can hold |"
    return "\n".join([head, "|---|---|---|---|", *rows])


FIGURES: dict[str, Callable[[], str]] = {
    "rollout": rollout,
    "equal_lag": equal_lag,
    "lag_map": lag_map,
    "clairvoyant": clairvoyant,
    "rounds": rounds,
    "kappa": kappa,
    "curve": curve,
    "agreement": agreement,
    "prefill": prefill,
    "kills": kills,
    "quickstart": quickstart,
    "quickstart_lines": quickstart_lines,
    "learning": partial(learning, LEARNING),
    "tool": partial(learning, TOOL),
    "agent": partial(learning, AGENT),
    "sokoban": partial(learning, SOKOBAN),
    "tool_in_trl": tool_in_trl,
    "sampling": sampling,
    "door": door,
    "turns": turns,
    "april": april,
    "accuracy": partial(accuracy, ACCURACY),
    "accuracy_sokoban": partial(accuracy, SOKOBAN_SCHEDULES),
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
    for image, source in DRAWN.items():
        command = [sys.executable, "benchmarks/learning_figure.py", source, f"docs/images/{image}.svg"]
        subprocess.run(command, cwd=ROOT, check=True)
