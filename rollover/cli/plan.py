"""``rollover plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rollover.cli.command import Count, FiniteFloat, OutputFile, PageFile
from rollover.errors import require

_ABOVE_ZERO = FiniteFloat(min=0, min_open=True)


@click.command("plan")
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
@click.option("--for-launch", is_flag=True, help="Plan only what rollover launch can run, and say what that costs.")
@click.option("--metis", is_flag=True, help="Begin the placement with METIS: for hundreds of nodes.")
@click.option("--quick", is_flag=True, help="Without simulation, shadow prices and alternatives.")
@click.option("--html", "page", type=PageFile(), metavar="FILE", help="Draw it all as a page.")
@click.option("--json", type=OutputFile(), metavar="FILE", help="Write the whole plan.")
@click.option(
    "--launch",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write scripts that start the servers, and the trainer's settings.",
)
@click.option("--server", type=click.Choice(["vllm", "sglang"]), help="Which servers --launch is for; vllm by default.")
def command(**options: Any) -> None:
    """Say which devices of a mixed fleet train and which roll out, in which shapes, and what that yields.

    FLEET is a TOML file, or a packaged example: 8xh100, a100-l40s, desk, h100-l4, h800-h20.

    \b
    rollover plan h800-h20 --model ./qwen2.5-7b --html plan.html --launch launch
    rollover plan fleet.toml --model Qwen/Qwen3-8B --max-staleness 2 --what-if count.h20=+8 --what-if staleness=4
    rollover plan fleet.toml --model ./qwen3-8b --aim cost --target 50000
    """
    require("scipy", purpose="rollover plan")
    from rollover.planner.job import PlanRequest, plan

    plan(PlanRequest(**{key: value for key, value in options.items() if value is not None}))
