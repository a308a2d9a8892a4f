"""The commands to use before a run: simulate its lengths, plan its devices, measure this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rollover.cli.command import Commands, Count, FiniteFloat, OutputFile, listed

MAX_REPLICAS = 10_000


@click.command(context_settings={"max_content_width": 100})
@click.argument("workload", required=False)
@click.option(
    "--from", "run", metavar="RUN", type=click.Path(path_type=Path), help="Go by a run: lengths, batch, engine."
)
@click.option(
    "--strategies", metavar="A,B,...", callback=listed(str), help="What to compare with sync; five by default."
)
@click.option(
    "--lag", "lag_budgets", metavar="L,...", callback=listed(float), help="Recommend for a mean lag of at most L."
)
@click.option("--max-staleness", type=Count(min=0), metavar="S", help="Bound all settings; unbounded otherwise.")
@click.option(
    "--scenario", type=click.Path(path_type=Path), metavar="FILE", help="Engine, trainer, rewards and setting (TOML)."
)
@click.option("--device", metavar="NAME", help="Engine: a device of the catalogue, as in h100-sxm.")
@click.option("--model", metavar="DIR", help="The model on that device.")
@click.option("--tp", type=Count(min=1, max=1024), default=1, metavar="N", help="Devices a replica.")
@click.option("--replicas", type=Count(min=1, max=MAX_REPLICAS), default=1, metavar="N", help="Engine replicas.")
@click.option(
    "--engine",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Engine: a result of benchmarks/engine.py, or their folder.",
)
@click.option("--batch-size", type=Count(min=1), metavar="N", help="Groups a step.")
@click.option("--group-size", type=Count(min=1), metavar="N", help="Samples a group.")
@click.option("--cap", "cap_tokens", type=Count(min=1), metavar="TOKENS", help="Longest response.")
@click.option("--steps", type=Count(min=1), metavar="N", help="Steps, warm-up included; 60, or as many as the run has.")
@click.option("--warmup", type=Count(min=0), metavar="N", help="Steps left out at the beginning; a third.")
@click.option("--seeds", type=Count(min=1), default=3, show_default=True, metavar="N")
@click.option("--jobs", type=Count(min=1, max=1024), default=1, show_default=True, metavar="N", help="Processes.")
@click.option("--out", "page", type=OutputFile(), metavar="FILE", help="Draw it all as a page (HTML).")
@click.option("--json", type=OutputFile(), metavar="FILE", help="Write all figures.")
def simulate(**options: Any) -> None:
    """Compare rollout strategies on response lengths before paying for them.

    WORKLOAD is a preset (r1-16k, qwen3-16k, heavy-32k, light-8k), a workload or lengths file, or a run; r1-16k when
    left out. Throughput is simulated beside lag, and a setting recommended.

    \b
    rollover simulate r1-16k --strategies april,concurrency --out frontier.html
    rollover simulate lengths.jsonl --device h100-sxm --model ./qwen3-4b --replicas 8 --lag 1
    rollover simulate --from runs/quickstart-20260101-120000
    """
    from rollover.frontier.job import Request, simulate

    simulate(Request(**{key: value for key, value in options.items() if value is not None}))


_ABOVE_ZERO = FiniteFloat(min=0, min_open=True)


@click.command(context_settings={"max_content_width": 100})
@click.argument("fleet", metavar="FLEET")
@click.option(
    "--model", required=True, metavar="DIR", help="A folder with a config.json, or a hub id; no weights needed."
)
@click.option("--workload", metavar="NAME", help="Preset, lengths, workload file or run; math-16k by default.")
@click.option("--max-staleness", type=Count(min=0), metavar="S", help="In policy versions; 4 by default.")
@click.option("--aim", type=click.Choice(["throughput", "cost"]), help="The fastest plan (default), or the cheapest.")
@click.option("--target", type=_ABOVE_ZERO, metavar="N", help="Trained tokens/s that the cheapest plan must reach.")
@click.option("--budget", type=_ABOVE_ZERO, metavar="N", help="Per hour; the fleet file's when left out.")
@click.option("--num-groups", type=Count(min=1), metavar="N", help="Prompts a training step; 128.")
@click.option("--group-size", type=Count(min=1), metavar="N", help="Samples a prompt; 8.")
@click.option("--cap", "cap_tokens", type=Count(min=1), metavar="TOKENS", help="Longest response.")
@click.option("--reward-s", type=FiniteFloat(min=0), metavar="S", help="Seconds that scoring a sample takes.")
@click.option("--reference-model", is_flag=True, help="The loss needs log-probs of a reference model.")
@click.option("--keep-kv", "keeps_kv", is_flag=True, help="Engines keep their caches over weight updates.")
@click.option(
    "--routing",
    type=click.Choice(["load", "length"]),
    help="Samples go where there is room (default), or lengths are predicted and go where they suit.",
)
@click.option(
    "--tail",
    type=click.Choice(["none", "soft", "hard"]),
    help="Whether the longest responses must keep the staleness bound too; soft by default.",
)
@click.option(
    "--what-if", multiple=True, metavar="KEY=N,...", help="Plan again with staleness, budget, count.X or price.X."
)
@click.option("--metis", is_flag=True, help="Begin the placement with METIS: for hundreds of nodes.")
@click.option("--quick", is_flag=True, help="Without simulation, shadow prices and alternatives.")
@click.option("--html", "page", type=OutputFile(), metavar="FILE", help="Draw it all as a page.")
@click.option("--json", type=OutputFile(), metavar="FILE", help="Write the whole plan.")
@click.option(
    "--launch",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write scripts that start the servers, and the trainer's settings.",
)
@click.option("--server", type=click.Choice(["vllm", "sglang"]), help="Which servers --launch is for; vllm by default.")
def plan(**options: Any) -> None:
    """Say which devices of a mixed fleet train and which roll out, in which shapes, and what that yields.

    FLEET is a TOML file, or a packaged example: 8xh100, a100-l40s, desk, h100-l4, h800-h20.

    \b
    rollover plan h800-h20 --model ./qwen2.5-7b --html plan.html --launch launch
    rollover plan fleet.toml --model Qwen/Qwen3-8B --max-staleness 2 --what-if count.h20=+8 --what-if staleness=4
    rollover plan fleet.toml --model ./qwen3-8b --aim cost --target 50000
    """
    from rollover.planner.job import Request, plan

    plan(Request(**{key: value for key, value in options.items() if value is not None}))


@click.command(context_settings={"max_content_width": 100})
@click.option("--out", type=OutputFile(), required=True, metavar="FILE", help="Write the device to FILE (TOML).")
@click.option("--key", metavar="NAME", help="Call the device so; made of its title when left out.")
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Measure with the model in DIR, not one of random weights.",
)
@click.option("--device", default="auto", show_default=True, metavar="NAME", help="cpu, cuda or cuda:N.")
@click.option(
    "--from", "measured", type=click.Path(path_type=Path), metavar="FILE", help="Measurements made elsewhere (JSON)."
)
def calibrate(out: Path, key: str | None, model: Path | None, device: str, measured: Path | None) -> None:
    """Measure this machine for the planner: decoding, prefill, training, copies.

    Takes minutes, on an idle machine. Every other time is held out, predicted from the rest, and compared. Elsewhere,
    python -m rollover.devices.measure FILE measures with torch alone, for --from.

    \b
    rollover calibrate --out mine.toml
    """
    from rollover.devices import job

    job.calibrate(out=out, key=key, model=model, device=device, measured=measured)


@click.group(cls=Commands, context_settings={"max_content_width": 100})
def workload() -> None:
    """Response lengths to simulate and plan with."""


@workload.command(context_settings={"max_content_width": 100})
@click.argument("source", metavar="RUN|FILE")
@click.option("--cap", type=Count(min=1), metavar="TOKENS", help="Cap of the lengths in FILE.")
@click.option("--html", "page", type=OutputFile(), metavar="FILE", help="Draw lengths, tail and fit as a page.")
@click.option(
    "--out", type=OutputFile(), metavar="FILE", help="Write the workload to FILE (TOML), not to the terminal."
)
def fit(source: str, cap: int | None, page: Path | None, out: Path | None) -> None:
    """Fit a workload to recorded response lengths, and say how well it fits.

    RUN is a run directory; FILE holds lengths as .jsonl or .parquet: a row for each sample (prompt, length) or for each
    prompt (prompt, lengths). Without --cap, the longest response in FILE is taken to have met it.

    \b
    rollover workload fit runs/quickstart-20260101-120000 --html fit.html
    rollover workload fit lengths.jsonl --cap 16384 --out mine.toml
    """
    from rollover.run import jobs

    jobs.fit_workload(source, cap_tokens=cap, page=page, out=out)
