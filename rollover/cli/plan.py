"""``rollover plan``."""

from __future__ import annotations

from typing import Any

import click

from rollover.cli.command import Count, FiniteFloat, OutputFile
from rollover.errors import require

_ABOVE_ZERO = FiniteFloat(min=0, min_open=True)


@click.command("plan")
@click.argument("fleet", metavar="FLEET")
@click.option(
    "--model", required=True, metavar="DIR", help="Folder with a config.json, or a hub id; weights are not needed."
)
@click.option("--workload", metavar="NAME", help="Preset, lengths file, workload file or run; math-16k by default.")
@click.option(
    "--max-staleness", type=Count(min=0), metavar="S", help="Staleness bound in policy versions; 4 by default."
)
@click.option(
    "--aim", type=click.Choice(["throughput", "cost"]), help="Find the fastest plan (default) or the cheapest."
)
@click.option("--target", type=_ABOVE_ZERO, metavar="N", help="Trained tokens/s that the cheapest plan must reach.")
@click.option("--budget", type=_ABOVE_ZERO, metavar="N", help="Budget per hour; the fleet file's when left out.")
@click.option("--num-groups", type=Count(min=1), metavar="N", help="Prompts per training step; 128 by default.")
@click.option("--group-size", type=Count(min=1), metavar="N", help="Samples per prompt; 8 by default.")
@click.option("--cap", "cap_tokens", type=Count(min=1), metavar="TOKENS", help="Longest response.")
@click.option("--reward-s", type=FiniteFloat(min=0), metavar="S", help="Seconds it takes to score a sample.")
@click.option("--held-s", type=FiniteFloat(min=0), metavar="S", help="Seconds that tools take; the run's by default.")
@click.option("--reference-model", is_flag=True, help="The loss needs the log-probs of a reference model.")
@click.option("--keep-kv", "keeps_kv", is_flag=True, help="Engines keep their caches across weight updates.")
@click.option(
    "--tail",
    type=click.Choice(["none", "soft", "hard"]),
    help="How strictly the longest responses must keep the staleness bound too; soft by default.",
)
@click.option("--for-launch", is_flag=True, help="Consider only plans that rollover launch can run.")
@click.option("--quick", is_flag=True, help="Skip simulation and alternatives.")
@click.option("--html", "page", type=OutputFile(), metavar="FILE", help="Write an HTML page with all results.")
@click.option("--json", type=OutputFile(), metavar="FILE", help="Write the whole plan as JSON.")
@click.option(
    "--server",
    type=click.Choice(["vllm", "sglang", "embedded_server"]),
    help="Kind of servers for --for-launch; vllm by default.",
)
def command(**options: Any) -> None:
    """Plan which devices of a mixed fleet train and which roll out, in which shapes, and with what throughput.

    FLEET is a TOML file or a packaged example: 8xh100, a100-l40s, desk, h100-l4, h800-h20.

    \b
    rollover plan h800-h20 --model ./qwen2.5-7b --html plan.html
    rollover plan fleet.toml --model Qwen/Qwen3-8B --max-staleness 2
    rollover plan fleet.toml --model ./qwen3-8b --aim cost --target 50000
    """
    require("scipy", purpose="rollover plan")
    from rollover.planner.job import PlanRequest, plan

    plan(PlanRequest(**{key: value for key, value in options.items() if value is not None}))
