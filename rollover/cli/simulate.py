"""``rollover simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rollover.cli.command import Count, OutputFile, listed

MAX_REPLICAS = 10_000


@click.command("simulate")
@click.argument("workload", required=False)
@click.option(
    "--from", "run", metavar="RUN", type=click.Path(path_type=Path), help="Take lengths, batch and engine from a run."
)
@click.option(
    "--strategies", metavar="A,B,...", callback=listed(str), help="Strategies to compare with sync; five by default."
)
@click.option(
    "--lag",
    "lag_budgets",
    metavar="L,...",
    callback=listed(float),
    help="Recommend a setting with a mean lag of at most L.",
)
@click.option(
    "--lag-of",
    type=click.Choice(["batch", "token", "group", "head", "max"]),
    help="The lag that counts. Of batches by default; with --from, of groups if the loss averages per response.",
)
@click.option(
    "--max-staleness", type=Count(min=0), metavar="S", help="Staleness bound of all settings; unbounded by default."
)
@click.option(
    "--scenario",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML file with engine, trainer, rewards and setting.",
)
@click.option("--device", metavar="NAME", help="Engine: a device of the catalogue, such as h100-sxm.")
@click.option("--model", metavar="DIR", help="The model on that device.")
@click.option("--catalogue", type=click.Path(path_type=Path), metavar="FILE", help="TOML file of your own devices.")
@click.option("--tp", type=Count(min=1, max=1024), default=1, metavar="N", help="Devices per replica.")
@click.option("--replicas", type=Count(min=1, max=MAX_REPLICAS), metavar="N", help="Number of engine replicas.")
@click.option("--batch-size", type=Count(min=1), metavar="N", help="Groups per step.")
@click.option("--group-size", type=Count(min=1), metavar="N", help="Samples per group.")
@click.option("--cap", "cap_tokens", type=Count(min=1), metavar="TOKENS", help="Longest response.")
@click.option(
    "--steps", type=Count(min=1), metavar="N", help="Steps, including warm-up; 60, or as many as the run has."
)
@click.option("--warmup", type=Count(min=0), metavar="N", help="Initial steps to leave out; a third by default.")
@click.option("--seeds", type=Count(min=1), default=3, show_default=True, metavar="N", help="Number of seeds.")
@click.option(
    "--jobs", type=Count(min=1, max=1024), default=1, show_default=True, metavar="N", help="Number of processes."
)
@click.option("--out", "page", type=OutputFile(), metavar="FILE", help="Write an HTML page with all results.")
@click.option("--json", type=OutputFile(), metavar="FILE", help="Write all figures as JSON.")
def command(**options: Any) -> None:
    """Compare rollout strategies on given response lengths before paying for any of them.

    WORKLOAD is a preset (r1-16k, qwen3-16k, heavy-32k, light-8k), a workload or lengths file, or a run; r1-16k when
    left out. The simulation shows throughput together with lag, and recommends a setting.

    \b
    rollover simulate r1-16k --strategies april,concurrency --out frontier.html
    rollover simulate lengths.jsonl --device h100-sxm --model ./qwen3-4b --replicas 8 --lag 1
    rollover simulate --from runs/quickstart-20260101-120000
    """
    from rollover.frontier.job import StudyRequest, simulate

    simulate(StudyRequest(**{key: value for key, value in options.items() if value is not None}))
