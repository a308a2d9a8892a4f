"""The commands that make a run, measure it, and draw it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollover.cli.command import OVERRIDES, ConfiguredCommand
from rollover.errors import ConfigError, DataError, ModelError, RolloverError
from rollover.privacy import Redactor

if TYPE_CHECKING:
    from rollover.run.config import RunConfig
    from rollover.run.directory import RunDir

DEFAULT_EXPERIMENT = "quickstart"
_QUIET = "rollover.quiet"
"""Where a context keeps whether only results are wanted: a wish of this call, which the run does not remember."""


def _run_dir(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--run-dir",
        "--output-dir",
        "run_dir",
        metavar="DIR",
        type=click.Path(path_type=Path),
        help="Write to DIR instead of runs/CONFIG-DATE-TIME.",
    )(command)


def _dry_run(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--dry-run", is_flag=True, help="Check everything, print the plan and the complete config, and stop."
    )(command)


def _be_quiet(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    ctx.meta[_QUIET] = value


_quiet = click.option(
    "--quiet",
    "-q",
    is_flag=True,
    expose_value=False,
    callback=_be_quiet,
    help="Print the result and errors, nothing on the way.",
)


@click.command(cls=ConfiguredCommand)
@click.argument("config", required=False)
@click.option("--resume", metavar="RUN", type=click.Path(path_type=Path), help="Go on with the run in RUN.")
@click.option(
    "--skip-batch",
    metavar="STEP",
    type=click.IntRange(min=0),
    help="With --resume: step over the batch of STEP, which cannot be trained; its tokens count as wasted.",
)
@_run_dir
@_dry_run
@_quiet
@click.pass_context
def train(
    ctx: click.Context,
    config: str | None,
    resume: Path | None,
    skip_batch: int | None,
    run_dir: Path | None,
    dry_run: bool,
) -> None:
    """Train a model, or go on with a run.

    CONFIG is a TOML file or the name of a packaged experiment; quickstart when left out.

    \b
    rollover train                                    the quickstart, minutes on a laptop
    rollover train run.toml --trainer.learning_rate 2e-6
    rollover train --resume runs/quickstart-20260101-120000
    """
    from rollover.run import directory

    overrides = ctx.meta[OVERRIDES]
    if skip_batch is not None and (resume is None or dry_run):
        raise click.UsageError("--skip-batch is for a run that goes on: give --resume RUN, without --dry-run", ctx)
    if resume is None:
        _start(ctx, config or DEFAULT_EXPERIMENT, run_dir, dry_run, "train")
        return
    if config is not None or run_dir is not None:
        other = "--run-dir" if config is None else "CONFIG"
        raise click.UsageError(f"--resume reads the config of its run and writes there; leave {other} out", ctx)
    if dry_run:
        _show_plan(ctx, directory.saved_config(resume, overrides))
        return
    _work(ctx, "train", *directory.open_for_resume(resume, overrides, sys.argv), skip_batch=skip_batch)


@click.command(cls=ConfiguredCommand)
@click.argument("config")
@_run_dir
@_dry_run
@_quiet
@click.pass_context
def sft(ctx: click.Context, config: str, run_dir: Path | None, dry_run: bool) -> None:
    """Fine-tune on worked solutions, without reinforcement learning.

    CONFIG is a TOML file or the name of a packaged experiment; its [sft] section applies, or the defaults.

    \b
    rollover sft quickstart --sft.num_steps 500
    """
    _start(ctx, config, run_dir, dry_run, "sft")


@click.command(name="eval", cls=ConfiguredCommand)
@click.argument("config", metavar="CONFIG|RUN")
@_run_dir
@_dry_run
@_quiet
@click.pass_context
def evaluate(ctx: click.Context, config: str, run_dir: Path | None, dry_run: bool) -> None:
    """Measure a model: pass@k on every evaluation source.

    Give a config, or a run directory to measure its newest checkpoint. Without evaluation sources, the prompts are
    those of the training sources.

    \b
    rollover eval runs/quickstart-20260101-120000
    rollover eval run.toml --model.path ./my-model --eval.samples_per_prompt 16 --eval.k '[1, 16]'
    """
    _start(ctx, config, run_dir, dry_run, "evaluate")


@click.command(context_settings={"max_content_width": 100})
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--open", "open_browser", is_flag=True, help="Show it in the browser.")
def report(run: Path, open_browser: bool) -> None:
    """Write RUN/report.html, also while RUN is at work."""
    from rollover.report.html import write_report

    path = write_report(run)
    click.echo(f"report: {path}")
    if open_browser:
        click.launch(str(path))


def _start(ctx: click.Context, name: str, run_dir: Path | None, dry_run: bool, job: str) -> None:
    """Begin a new run of ``job``, a function of ``rollover.run.jobs``."""
    from rollover.run import directory
    from rollover.run.config import load
    from rollover.run.jobs import completed

    overrides = ctx.meta[OVERRIDES]
    of_run = job == "evaluate" and directory.is_run(Path(name))
    config = _checkpoint_config(Path(name), overrides) if of_run else load(name, overrides)
    config, notes = completed(config, job)
    if dry_run:
        _show_plan(ctx, config, notes)
        return
    for note in notes:
        click.echo(note, err=True)
    experiment = Path(name).resolve().name if of_run else Path(name).stem
    path = run_dir or directory.default_path(experiment if job == "train" else f"{experiment}-{ctx.command.name}")
    _work(ctx, job, config, directory.create(config, path, sys.argv))


def _checkpoint_config(run: Path, overrides: Sequence[str]) -> RunConfig:
    """The run's config with its newest checkpoint as the model."""
    from rollover.errors import RunError
    from rollover.run import directory
    from rollover.trainer.checkpoint import latest_checkpoint

    checkpoint = latest_checkpoint(run / "checkpoints")
    if checkpoint is None:
        raise RunError(f"{run} has no checkpoint yet: name a model with a config and --model.path")
    model = ["--model.path", str(checkpoint), "--model.scratch", "none", "--sft", "none"]
    return directory.derived_config(run, [*model, *overrides])


def _work(ctx: click.Context, job: str, config: RunConfig, run: RunDir, **options: Any) -> None:
    """Do ``job`` with its ``options`` in its directory, and say where its report is."""
    from rollover.run import jobs

    if click.get_current_context().meta[_QUIET]:
        config = replace(config, logging=replace(config.logging, progress="off"))
    _redactor(ctx, config)
    with run:
        try:
            {"train": jobs.train, "sft": jobs.sft, "evaluate": jobs.evaluate}[job](config, run, **options)
        except KeyboardInterrupt:
            if job == "train":
                click.echo(f"stopped; go on with: {run.resume_command}", err=True)
            raise
        except (RolloverError, OSError) as error:
            if isinstance(error, ConfigError | DataError | ModelError):
                run.discard_unless_begun()
            if job == "train" and run.config_file.is_file():
                error.add_note(f"once that is mended, go on with: {run.resume_command}")
            raise
        finally:
            if run.report.is_file():
                click.echo(f"report: {run.report}")


def _show_plan(ctx: click.Context, config: RunConfig, notes: Sequence[str] = ()) -> None:
    """The plan as comments over the config: what is printed is itself a config file, but for secrets."""
    from rollover.run.config import resolved
    from rollover.run.jobs import plan
    from rollover.settings import toml

    redactor = _redactor(ctx, config)
    for line in (*notes, *plan(config)):
        click.echo(f"# {redactor.text(line)}")
    click.echo(f"\n{toml.dumps(redactor.value(resolved(config)))}", nl=False)


def _redactor(ctx: click.Context, config: RunConfig) -> Redactor:
    """What keeps secrets off the terminal; it has met those of ``config``."""
    from rollover.run.config import resolved

    redactor = ctx.find_object(Redactor)
    assert redactor is not None
    redactor.value(resolved(config))
    return redactor
