"""The command line: reads what the user wants, calls the function that does it, and reports failures.

Every failure the user can mend ends here as one message and exit code 2; a traceback means a bug. What needs
torch is imported inside the command that runs it, so ``--help`` and a refused config answer at once.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import rollover
from rollover.errors import ConfigError, DataError, ModelError, RolloverError, nearest

if TYPE_CHECKING:
    from rollover.config import RunConfig
    from rollover.rundir import RunDir

DEFAULT_EXPERIMENT = "quickstart"
_OVERRIDES = "rollover.overrides"


class _Formatter(click.HelpFormatter):
    """Help with headings that stand out on a terminal."""

    def write_heading(self, heading: str) -> None:
        self.write(f"{'':>{self.current_indent}}{click.style(f'{heading}:', bold=True)}\n")


class _Context(click.Context):
    formatter_class = _Formatter


class _Commands(click.Group):
    """Commands; a misspelt one gets a suggestion."""

    context_class = _Context

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            raise click.UsageError(f"no command {args[0]!r}{nearest(args[0], self.commands)}", ctx)
        return super().resolve_command(ctx, args)


class _ConfiguredCommand(click.Command):
    """A command that takes ``--section.key value`` beside its own options, in any order."""

    context_class = _Context

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, ctx.meta[_OVERRIDES] = self._split(ctx, args)
        return super().parse_args(ctx, own)

    def _split(self, ctx: click.Context, args: Sequence[str]) -> tuple[list[str], list[str]]:
        """Arguments of the command itself, and overrides of the config."""
        options = {
            name: isinstance(param, click.Option) and not param.is_flag
            for param in self.get_params(ctx)
            for name in param.opts
        }
        own: list[str] = []
        overrides: list[str] = []
        rest = list(args)
        while rest:
            argument = rest.pop(0)
            if argument == "--":
                own += [argument, *rest]
                break
            name, equals, value = argument.partition("=")
            if name.replace("_", "-") in options:
                name = name.replace("_", "-")
            is_override = name.startswith("--") and name not in options
            if is_override:
                self._check_key(ctx, name, options)
            target = overrides if is_override else own
            target.append(name + equals + value)
            if (is_override or options.get(name)) and not equals and rest and not rest[0].startswith("--"):
                target.append(rest.pop(0))
        return own, overrides

    def _check_key(self, ctx: click.Context, name: str, options: Iterable[str]) -> None:
        """Refuse what is neither ``--section.key`` nor a key outside all sections."""
        from rollover.config import RunConfig

        known = [f"--{f.name}" for f in fields(RunConfig)]
        if "." not in name and name.replace("-", "_") not in [key.replace("-", "_") for key in known]:
            long = [option for option in options if option.startswith("--")]
            raise click.UsageError(f"no option {name!r}{nearest(name, [*long, *known])}", ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        with formatter.section("Configuration"):
            formatter.write_dl(
                [
                    ("--KEY VALUE", "Set a key outside all sections, as in --steps 20."),
                    (
                        "--SECTION.KEY VALUE",
                        "Set any key, as in --rollout.group_size 16 or --tasks.train.0.weight 2.",
                    ),
                ]
            )


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


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Run 'rollover COMMAND --help' for the options of a command.",
)
@click.version_option(rollover.__version__, prog_name="rollover", message="%(prog)s %(version)s")
def cli() -> None:
    """Train language models with reinforcement learning and waste no rollout."""


@cli.command(cls=_ConfiguredCommand)
@click.argument("config", required=False)
@click.option("--resume", metavar="RUN", type=click.Path(path_type=Path), help="Go on with the run in RUN.")
@_run_dir
@_dry_run
@click.pass_context
def train(ctx: click.Context, config: str | None, resume: Path | None, run_dir: Path | None, dry_run: bool) -> None:
    """Train a model, or go on with a run.

    CONFIG is a TOML file or the name of a packaged experiment; quickstart when left out.

    \b
    rollover train                                    the quickstart, minutes on a laptop
    rollover train run.toml --trainer.learning_rate 2e-6
    rollover train --resume runs/quickstart-20260101-120000
    """
    from rollover import rundir

    overrides = ctx.meta[_OVERRIDES]
    if resume is None:
        _start(ctx, config or DEFAULT_EXPERIMENT, run_dir, dry_run, "train")
        return
    if config is not None or run_dir is not None:
        other = "--run-dir" if config is None else "CONFIG"
        raise click.UsageError(f"--resume reads the config of its run and writes there; leave {other} out", ctx)
    if dry_run:
        _show_plan(rundir.saved_config(resume, overrides))
        return
    _work("train", *rundir.open_for_resume(resume, overrides, sys.argv))


@cli.command(cls=_ConfiguredCommand)
@click.argument("config")
@_run_dir
@_dry_run
@click.pass_context
def sft(ctx: click.Context, config: str, run_dir: Path | None, dry_run: bool) -> None:
    """Fine-tune on worked solutions, without reinforcement learning.

    CONFIG is a TOML file or the name of a packaged experiment; its [sft] section applies.

    \b
    rollover sft quickstart --sft.num_steps 500
    """
    _start(ctx, config, run_dir, dry_run, "sft")


@cli.command(name="eval", cls=_ConfiguredCommand)
@click.argument("config", metavar="CONFIG|RUN")
@_run_dir
@_dry_run
@click.pass_context
def evaluate(ctx: click.Context, config: str, run_dir: Path | None, dry_run: bool) -> None:
    """Measure a model: pass@k on every evaluation source.

    Give a config, or a run directory to measure its newest checkpoint.

    \b
    rollover eval runs/quickstart-20260101-120000
    rollover eval run.toml --model.path ./my-model --eval.samples_per_prompt 16 --eval.k '[1, 16]'
    """
    _start(ctx, config, run_dir, dry_run, "evaluate")


@cli.command(context_settings={"max_content_width": 100})
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--open", "open_browser", is_flag=True, help="Show it in the browser.")
def report(run: Path, open_browser: bool) -> None:
    """Write RUN/report.html, also while RUN is at work."""
    from rollover.report.html import write_report

    path = write_report(run)
    click.echo(f"report: {path}")
    if open_browser:
        click.launch(str(path))


class _OutputFile(click.Path):
    """A file to be written: its folder must be there before the work begins."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        file = Path(str(super().convert(value, param, ctx)))
        if not file.parent.is_dir():
            self.fail(f"{file}: there is no folder {str(file.parent)!r}", param, ctx)
        return file


def _listed(kind: type) -> Callable[[click.Context, click.Parameter, str | None], tuple[Any, ...] | None]:
    """Reads values between commas."""

    def read(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[Any, ...] | None:
        try:
            return None if text is None else tuple(kind(part.strip()) for part in text.split(",") if part.strip())
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a list of numbers between commas", ctx, param) from None

    return read


@cli.command(context_settings={"max_content_width": 100})
@click.argument("workload", required=False)
@click.option(
    "--from", "run", metavar="RUN", type=click.Path(path_type=Path), help="Go by a run: lengths, batch, engine."
)
@click.option(
    "--strategies", metavar="A,B,...", callback=_listed(str), help="What to compare with sync; five by default."
)
@click.option(
    "--lag", "lag_budgets", metavar="L,...", callback=_listed(float), help="Recommend for a mean lag of at most L."
)
@click.option(
    "--max-staleness", type=click.IntRange(min=0), metavar="S", help="Bound all settings; unbounded otherwise."
)
@click.option(
    "--scenario", type=click.Path(path_type=Path), metavar="FILE", help="Engine, trainer, rewards and setting (TOML)."
)
@click.option("--device", metavar="NAME", help="Engine: a device of the catalogue, as in h100-sxm.")
@click.option("--model", metavar="DIR", help="The model on that device.")
@click.option("--tp", type=click.IntRange(min=1), default=1, metavar="N", help="Devices a replica.")
@click.option("--replicas", type=click.IntRange(min=1), default=1, metavar="N", help="Engine replicas.")
@click.option(
    "--engine",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Engine: a result of benchmarks/engine.py, or their folder.",
)
@click.option("--batch-size", type=click.IntRange(min=1), metavar="N", help="Groups a step.")
@click.option("--group-size", type=click.IntRange(min=1), metavar="N", help="Samples a group.")
@click.option("--cap", "cap_tokens", type=click.IntRange(min=1), metavar="TOKENS", help="Longest response.")
@click.option(
    "--steps", type=click.IntRange(min=1), metavar="N", help="Steps, warm-up included; 60, or as many as the run has."
)
@click.option("--warmup", type=click.IntRange(min=0), metavar="N", help="Steps left out at the beginning; a third.")
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, metavar="N")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Processes.")
@click.option("--out", "page", type=_OutputFile(), metavar="FILE", help="Draw it all as a page (HTML).")
@click.option("--json", type=_OutputFile(), metavar="FILE", help="Write all figures.")
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


_ABOVE_ZERO = click.FloatRange(min=0, min_open=True)


@cli.command(context_settings={"max_content_width": 100})
@click.argument("fleet", metavar="FLEET")
@click.option(
    "--model", required=True, metavar="DIR", help="A folder with a config.json, or a hub id; no weights needed."
)
@click.option("--workload", metavar="NAME", help="Preset, lengths, workload file or run; math-16k by default.")
@click.option("--max-staleness", type=click.IntRange(min=0), metavar="S", help="In policy versions; 4 by default.")
@click.option("--aim", type=click.Choice(["throughput", "cost"]), help="The fastest plan (default), or the cheapest.")
@click.option("--target", type=_ABOVE_ZERO, metavar="N", help="Trained tokens/s that the cheapest plan must reach.")
@click.option("--budget", type=_ABOVE_ZERO, metavar="N", help="Per hour; the fleet file's when left out.")
@click.option("--num-groups", type=click.IntRange(min=1), metavar="N", help="Prompts a training step; 128.")
@click.option("--group-size", type=click.IntRange(min=1), metavar="N", help="Samples a prompt; 8.")
@click.option("--cap", "cap_tokens", type=click.IntRange(min=1), metavar="TOKENS", help="Longest response.")
@click.option("--reward-s", type=click.FloatRange(min=0), metavar="S", help="Seconds that scoring a sample takes.")
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
@click.option("--html", "page", type=_OutputFile(), metavar="FILE", help="Draw it all as a page.")
@click.option("--json", type=_OutputFile(), metavar="FILE", help="Write the whole plan.")
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
    from rollover.planning import Request, plan

    plan(Request(**{key: value for key, value in options.items() if value is not None}))


@cli.command(context_settings={"max_content_width": 100})
@click.option("--out", type=_OutputFile(), required=True, metavar="FILE", help="Write the device to FILE (TOML).")
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
    python -m rollover.calibration.measure FILE measures with torch alone, for --from.

    \b
    rollover calibrate --out mine.toml
    """
    from rollover.calibration import job

    job.calibrate(out=out, key=key, model=model, device=device, measured=measured)


@cli.group(cls=_Commands, context_settings={"max_content_width": 100})
def workload() -> None:
    """Response lengths to simulate and plan with."""


@workload.command(context_settings={"max_content_width": 100})
@click.argument("source", metavar="RUN|FILE")
@click.option("--cap", type=click.IntRange(min=1), metavar="TOKENS", help="Cap of the lengths in FILE.")
@click.option("--html", "page", type=_OutputFile(), metavar="FILE", help="Draw lengths, tail and fit as a page.")
@click.option(
    "--out", type=_OutputFile(), metavar="FILE", help="Write the workload to FILE (TOML), not to the terminal."
)
def fit(source: str, cap: int | None, page: Path | None, out: Path | None) -> None:
    """Fit a workload to recorded response lengths, and say how well it fits.

    RUN is a run directory; FILE holds lengths as .jsonl or .parquet: a row for each sample (prompt, length) or for each
    prompt (prompt, lengths). Without --cap, the longest response in FILE is taken to have met it.

    \b
    rollover workload fit runs/quickstart-20260101-120000 --html fit.html
    rollover workload fit lengths.jsonl --cap 16384 --out mine.toml
    """
    from rollover import jobs

    jobs.fit_workload(source, cap_tokens=cap, page=page, out=out)


def _start(ctx: click.Context, name: str, run_dir: Path | None, dry_run: bool, job: str) -> None:
    """Begin a new run of ``job``, a function of ``rollover.jobs``."""
    from rollover import rundir
    from rollover.config import load

    overrides = ctx.meta[_OVERRIDES]
    of_run = job == "evaluate" and rundir.is_run(Path(name))
    config = _checkpoint_config(Path(name), overrides) if of_run else load(name, overrides)
    if dry_run:
        _show_plan(config)
        return
    experiment = Path(name).resolve().name if of_run else Path(name).stem
    path = run_dir or rundir.default_path(experiment if job == "train" else f"{experiment}-{ctx.command.name}")
    _work(job, config, rundir.create(config, path, sys.argv))


def _checkpoint_config(run: Path, overrides: Sequence[str]) -> RunConfig:
    """The run's config with its newest checkpoint as the model."""
    from rollover import rundir
    from rollover.errors import RunError
    from rollover.trainer.checkpoint import latest_checkpoint

    checkpoint = latest_checkpoint(run / "checkpoints")
    if checkpoint is None:
        raise RunError(f"{run} has no checkpoint yet: name a model with a config and --model.path")
    model = ["--model.path", str(checkpoint), "--model.scratch", "none", "--sft", "none"]
    return rundir.derived_config(run, [*model, *overrides])


def _work(job: str, config: RunConfig, run: RunDir) -> None:
    """Do ``job`` in its directory, and say where its report is."""
    from rollover import jobs

    with run:
        try:
            {"train": jobs.train, "sft": jobs.sft, "evaluate": jobs.evaluate}[job](config, run)
        except KeyboardInterrupt:
            if job == "train":
                click.echo(f"stopped; go on with: {run.resume_command}", err=True)
            raise
        except (RolloverError, OSError) as error:
            if isinstance(error, ConfigError | DataError | ModelError):
                run.discard_unless_begun()
            if job == "train" and run.journal.is_file():
                error.add_note(f"nothing is lost; go on with: {run.resume_command}")
            raise
        finally:
            if run.report.is_file():
                click.echo(f"report: {run.report}")


def _show_plan(config: RunConfig) -> None:
    """The plan as comments over the config: what is printed is itself a config file."""
    from rollover.config import to_toml
    from rollover.jobs import plan

    for line in plan(config):
        click.echo(f"# {line}")
    click.echo(f"\n{to_toml(config)}", nl=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        cli.main(args=arguments or ["--help"], prog_name="rollover", standalone_mode=False)
    except click.UsageError as error:
        hint = f"\nsee: {error.ctx.command_path} --help" if error.ctx else ""
        return _fail(error.format_message() + hint)
    except click.ClickException as error:
        return _fail(error.format_message())
    except RolloverError as error:
        return _fail(str(error), error)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        file = f" ({error.filename})" if error.filename else ""
        return _fail(f"no space left on the disk{file}: make room", error)
    except (click.Abort, KeyboardInterrupt):
        return 130
    return 0


def _fail(message: str, error: BaseException | None = None) -> int:
    """Show the message, and below it what was noted on the error."""
    first, *more = "\n".join([message, *getattr(error, "__notes__", ())]).splitlines() or [""]
    click.echo(f"{click.style('error:', fg='red', bold=True)} {first}", err=True)
    for line in more:
        click.echo(f"       {line}", err=True)
    return 2
