"""The command line: parses arguments, calls the function that does the work, and reports failures.

Every failure that the user can fix ends here as one message and exit code 2; a traceback means a bug. Modules that
need torch are imported inside the command that runs them, so that ``--help`` and a refused config answer at once.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Sequence

import click

from rollover.cli import (
    calibrate,
    evaluate,
    export,
    launch,
    plan,
    report,
    samples,
    serve,
    sft,
    simulate,
    train,
    worker,
    workers,
    workload,
)
from rollover.cli.command import Commands
from rollover.cli.output import lasting_output
from rollover.errors import RolloverError, missing_extra, refusal
from rollover.privacy import Redactor
from rollover.run.signals import Stopped, handled, stop
from rollover.version import __version__

_ENDLESS = re.compile(r"(\S{100})\S{300,}(\S{20})")
"""A word, such as a number of thousands of digits, of which a message shows the ends."""


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Run 'rollover COMMAND --help' for the options of a command.",
)
@click.version_option(__version__, prog_name="rollover", message="%(prog)s %(version)s")
def cli() -> None:
    """Train language models with reinforcement learning and waste no rollout."""


for module in (
    train,
    sft,
    evaluate,
    export,
    report,
    samples,
    simulate,
    plan,
    launch,
    calibrate,
    workload,
    serve,
    worker,
    workers,
):
    cli.add_command(module.command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    redactor = Redactor(arguments)  # the commands tell it the secrets of their configs
    with lasting_output():
        return _run(arguments, redactor)


def _run(arguments: list[str], redactor: Redactor) -> int:
    try:
        for argument in arguments:
            _check_text(argument)
        with handled(stop):
            cli.main(args=arguments or ["--help"], prog_name="rollover", standalone_mode=False, obj=redactor)
    except click.UsageError as error:
        hint = f"\nsee: {error.ctx.command_path} --help" if error.ctx else ""
        return _fail(redactor, error.format_message() + hint)
    except click.ClickException as error:
        return _fail(redactor, error.format_message())
    except RolloverError as error:
        return _fail(redactor, str(error), error)
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error)) is None:  # not part of an extra: a bug
            raise
        return _fail(redactor, str(missing), error)
    except OSError as error:
        if error.errno is None:  # not raised by the operating system: a bug
            raise
        return _fail(redactor, refusal(error), error)
    except (click.Abort, KeyboardInterrupt) as end:  # click makes the former of the latter
        stopped = end.__cause__ if isinstance(end, click.Abort) else end
        return stopped.exit_code if isinstance(stopped, Stopped) else 128 + signal.SIGINT
    return 0


def _check_text(argument: str) -> None:
    """Reject bytes that are not text: they could be neither stored in a config nor printed."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        shown = argument.encode(errors="backslashreplace").decode()
        raise click.UsageError(f"'{shown}' is not text in UTF-8") from None


def _fail(redactor: Redactor, message: str, error: BaseException | None = None) -> int:
    """Show the message without secrets, followed by the notes on the error."""
    text = redactor.text("\n".join([message, *getattr(error, "__notes__", ())]))
    text = _ENDLESS.sub(r"\1...\2", text)
    first, *more = text.encode(errors="backslashreplace").decode().splitlines() or [""]
    click.echo(f"{click.style('error:', fg='red', bold=True)} {first}", err=True)
    for line in more:
        click.echo(f"       {line}", err=True)
    return 2
