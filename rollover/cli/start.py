"""The parts shared by all commands that create a run: options, the dry run, the run directory and errors."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollover.cli.command import OVERRIDES
from rollover.errors import RolloverError, require
from rollover.privacy import Redactor

if TYPE_CHECKING:
    from rollover.run.config import RunConfig
    from rollover.run.directory import RunDir

_QUIET = "rollover.quiet"
"""The key under which a context stores whether to print only results; the run does not remember it."""


_OPTIONS = (
    click.option(
        "--run-dir",
        "--output-dir",
        "run_dir",
        metavar="DIR",
        type=click.Path(path_type=Path),
        help="Write to DIR instead of runs/CONFIG-DATE-TIME.",
    ),
    click.option("--dry-run", is_flag=True, help="Check everything, print the plan and the complete config, and stop."),
    click.option(
        "--quiet",
        "-q",
        is_flag=True,
        expose_value=False,
        callback=lambda ctx, param, value: ctx.meta.update({_QUIET: value}),
        help="Print only the result and errors, no progress.",
    ),
)


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of every command that creates a run."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def start(ctx: click.Context, name: str, run_dir: Path | None, dry_run: bool, job: str) -> None:
    """Start a new run of ``job``, a function in ``rollover.run.jobs``."""
    require("torch", purpose=ctx.command_path)
    from rollover.run import directory
    from rollover.run.building import build_config
    from rollover.run.jobs import completed

    overrides = ctx.meta[OVERRIDES]
    if job == "evaluate":
        overrides = [*_one_evaluation(overrides), *overrides]
    of_run = job == "evaluate" and directory.is_run(Path(name))
    with ExitStack() as stack:
        config = _checkpoint_config(Path(name), overrides, stack) if of_run else build_config(name, overrides)
        config, notes = completed(config, job)
        if dry_run:
            show_plan(ctx, config, notes, job)
            return
        for note in notes:
            click.echo(note, err=True)
        job_name = ctx.command.name or job
        if run_dir is None and of_run:
            run_dir = directory.default_path(job_name, Path(name))
        elif run_dir is None:
            stem = Path(name).stem
            run_dir = directory.default_path(stem if job == "train" else f"{stem}-{job_name}")
        work(ctx, job, config, directory.create(config, run_dir, sys.argv, job=job_name))


def _one_evaluation(overrides: Sequence[str]) -> list[str]:
    """Return overrides that take back what compares the evaluations of a run, and the sampling of its sources if others
    take their place."""
    others = any(argument.partition("=")[0] == "--tasks.eval" for argument in overrides)
    return [
        *("--eval.metric", "accuracy", "--eval.keep_best", "false", "--eval.patience", "0"),
        *(("--eval.sets", "{}") if others else ()),
    ]


def _checkpoint_config(run: Path, overrides: Sequence[str], stack: ExitStack) -> RunConfig:
    """Return the run's config with its newest checkpoint as the model, held until ``stack`` is closed; adapters are
    merged for it on first use, and models of checkpoints that were deleted or written again are deleted too."""
    from rollover.run import directory
    from rollover.run.export import export, held_checkpoint
    from rollover.weights.adapters import holds_adapters

    model = checkpoint = stack.enter_context(held_checkpoint(run))
    if holds_adapters(checkpoint):
        for merged in (run / "merged").glob("step_*"):
            source = run / "checkpoints" / merged.name  # an evaluation of it would hold this checkpoint
            if not source.is_dir() or source.stat().st_mtime > merged.stat().st_mtime:
                shutil.rmtree(merged, ignore_errors=True)
        model = run / "merged" / checkpoint.name
        if not model.is_dir():
            export(run, model, step=int(checkpoint.name.removeprefix("step_")))
    path = ["--model.path", str(model), "--model.scratch", "none", "--sft", "none"]
    return directory.derived_config(run, [*path, *overrides])


def work(ctx: click.Context, job: str, config: RunConfig, run: RunDir, **options: Any) -> None:
    """Run ``job`` with its ``options`` in its directory, and say where its report is."""
    from rollover.run import jobs

    if click.get_current_context().meta[_QUIET]:
        config = replace(config, logging=replace(config.logging, progress="off"))
    _redactor(ctx, config)
    with run:
        try:
            {"train": jobs.train, "sft": jobs.sft, "evaluate": jobs.evaluate}[job](config, run, **options)
        except KeyboardInterrupt:
            if job == "train":
                click.echo(f"stopped; resume with: {run.resume_command}", err=True)
            raise
        except (RolloverError, OSError) as error:
            run.discard_after(error)
            if job == "train" and run.config_file.is_file():
                error.add_note(f"once that is fixed, resume with: {run.resume_command}")
            raise
        finally:
            if run.report.is_file():
                click.echo(f"report: {run.report}")


def show_plan(ctx: click.Context, config: RunConfig, notes: Sequence[str] = (), job: str = "train") -> None:
    """Print the config and the plan as comments below it: the output is itself a config file, except for secrets."""
    from rollover.run.dry_run import dry_run
    from rollover.settings import toml
    from rollover.settings.plain import resolved

    redactor = _redactor(ctx, config)
    plan = [*map(redactor.text, notes), *dry_run(config, job)]
    click.echo(toml.dumps(redactor.value(resolved(config, for_file=True))))
    for line in plan:
        click.echo(f"# {line}")


def _redactor(ctx: click.Context, config: RunConfig) -> Redactor:
    """Return the redactor that keeps secrets off the terminal, including the secrets of ``config``."""
    from rollover.settings.plain import resolved

    redactor = ctx.find_object(Redactor)
    assert redactor is not None
    redactor.value(resolved(config))
    return redactor
