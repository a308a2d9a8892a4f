"""``rollover launch``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollover.cli.command import OVERRIDES, ConfiguredCommand
from rollover.cli.start import run_options, show_plan, work
from rollover.errors import require

if TYPE_CHECKING:
    from rollover.planner.plan import Plan
    from rollover.run.config import RunConfig


@click.command("launch", cls=ConfiguredCommand)
@click.argument("plan", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("config")
@run_options
@click.pass_context
def command(ctx: click.Context, plan: Path, config: str, run_dir: Path | None, dry_run: bool) -> None:
    """Run a plan on a Ray cluster.

    PLAN is a file written by `rollover plan FLEET --for-launch --json PLAN`. CONFIG is a TOML file with the model, the
    tasks and the kind of servers. The plan says how many ranks train, which servers decode on which type of node, and
    how large a step is. Its settings replace CONFIG's, with a line for each change, and command-line options override
    both.

    \b
    rollover launch plan.json run.toml --dry-run      show the placement and the whole config
    rollover launch plan.json run.toml --cluster.address 10.0.0.1:6379
    """
    require("torch", "ray", purpose=ctx.command_path)
    from rollover.cluster.connect import connect
    from rollover.cluster.nodes import alive_nodes
    from rollover.run import directory
    from rollover.run.launching import check_types, launched_config, read_plan

    made = read_plan(plan)
    launched, notes = launched_config(made, config, ctx.meta[OVERRIDES], name=str(plan))
    assert launched.cluster is not None, "the plan sets it"
    _show_places(made, launched)
    for note in notes:
        click.echo(note, err=True)
    check_types(made, launched, [node.resources for node in alive_nodes(connect(launched.cluster))])
    if dry_run:
        show_plan(ctx, launched)
        return
    path = run_dir or directory.default_path(f"{Path(config).stem}-launch")
    work(ctx, "train", launched, directory.create(launched, path, sys.argv))


def _show_places(plan: Plan, config: RunConfig) -> None:
    from rich.console import Console
    from rich.table import Table

    from rollover.cluster.nodes import written
    from rollover.run.launching import who_goes_where

    table = Table("role", "count", "each on", "samples at a time", "resources of its node")
    for placed in who_goes_where(plan, config):
        resources = written(placed.resources) if placed.resources else "any"
        running = "" if placed.running is None else str(placed.running)
        table.add_row(placed.role, str(placed.count), placed.each, running, resources)
    Console(highlight=False, stderr=True).print(table)
