"""``rollover worker``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import click

from rollover.cli.command import OVERRIDES, ConfiguredCommand
from rollover.errors import require
from rollover.privacy import Redactor
from rollover.run.signals import handled, stop
from rollover.version import __version__

_FILE = click.Path(path_type=Path)
"""A file that may not exist; the code that opens it reports that."""


class WorkerCommand(ConfiguredCommand):
    """Takes the config keys of a worker, not of a run."""

    examples = ("--max_held_tokens 100000", "--engine.kind vllm or --engine.max_running 16")

    def keys(self) -> list[str]:
        from dataclasses import fields

        from rollover.run.worker import WorkerSettings

        return [f.name for f in fields(WorkerSettings)]


@click.command("worker", cls=WorkerCommand)
@click.option("--join", "url", required=True, metavar="URL", help="Address of the coordinator: wss://HOST:PORT.")
@click.option(
    "--token-file",
    type=_FILE,
    metavar="FILE",
    help="Read the worker's token from FILE instead of ROLLOVER_SWARM_TOKEN.",
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Keep weights in DIR instead of ~/.cache/rollover/workers/NAME.",
)
@click.option(
    "--ca-file",
    type=_FILE,
    metavar="FILE",
    help="Verify the coordinator with the certificates in FILE (PEM) instead of the system's.",
)
@click.option("--insecure", is_flag=True, help="Allow a plain connection, over a network that is itself private.")
@click.option("--quiet", "-q", is_flag=True, help="Print only errors.")
@click.pass_context
def command(
    ctx: click.Context,
    url: str,
    token_file: Path | None,
    cache: Path | None,
    ca_file: Path | None,
    insecure: bool,
    quiet: bool,
) -> None:
    """Generate rollouts for a run on another machine.

    The worker dials in to the trainer's side of a swarm, fetches its weights, and serves them with any engine until it
    is stopped with Ctrl-C. It reconnects by itself when the connection is lost.

    \b
    rollover worker --join wss://trainer.example:8790 --token-file laptop.token
    rollover worker --join wss://trainer.example:8790 --engine.kind vllm --engine.launch true
    """
    require("msgspec", "zstandard", "cryptography", "websockets", purpose=ctx.command_path)
    from rollover.run.worker import WorkerSettings, opener
    from rollover.settings.overrides import parse_overrides
    from rollover.settings.schema import build
    from rollover.settings.toml import Document
    from rollover.swarm.wire.address import CoordinatorAddress
    from rollover.swarm.wire.token import read_token

    config = build(WorkerSettings, Document(name="command line", data={}), parse_overrides(ctx.meta[OVERRIDES]))
    address = CoordinatorAddress.parse(url, insecure=insecure)
    token = read_token(token_file, os.environ)
    if config.engine.declared.in_process:
        require("torch", "safetensors", purpose="the embedded engine of a worker")
    from rollover.swarm.worker.joining import default_cache, work_for

    redactor = ctx.find_object(Redactor) or Redactor()
    redactor.value(token.text, "token")

    def say(line: str) -> None:
        if not quiet:
            click.echo(redactor.text(f"{token.name}: {line}"), err=True)

    cache = cache or default_cache(token)
    stopping = _Stopping(say)
    with handled(stopping.on_signal):
        open_on = opener(config, name=f"worker-{token.name}", root=cache)
        software = f"rollover {__version__}"
        asyncio.run(work_for(address, token, config, open_on, cache, ca_file, software, say, stopping.started))


class _Stopping:
    """Handles Ctrl-C and similar signals: the first hands over the worker's calls, the second ends it at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._stop: Callable[[str], None] | None = None
        self._asked = False

    def started(self, stop: Callable[[str], None]) -> None:
        self._stop = stop

    def on_signal(self, number: int) -> None:
        if self._stop is None:
            stop(number)
        elif self._asked:
            os._exit(128 + number)
        else:
            self._asked = True
            self._say("handing over; press Ctrl-C again to stop immediately")
            self._stop("stopped by its user")
