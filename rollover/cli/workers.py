"""``rollover workers``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollover.errors import ConfigError, RolloverError, RunError, require

if TYPE_CHECKING:
    from rollover.swarm.coordinator.status.snapshot import SwarmStatus
    from rollover.swarm.coordinator.trust import Blocklist


_SILENT_S = 15.0
"""Longest age of a current status; the trainer writes it every two seconds."""


@click.command("workers", context_settings={"max_content_width": 100})
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--add", metavar="NAME", help="Create a token for a new worker, and show it once.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="With --add: write the token to this file instead of showing it."
)
@click.option("--revoke", metavar="NAME", help="Reject a worker's token from now on, and disconnect it.")
@click.option("--trust", metavar="NAME", help="Readmit a worker that was sent away as untrusted.")
def command(run: Path, add: str | None, out: Path | None, revoke: str | None, trust: str | None) -> None:
    """List the workers of RUN, add workers, or remove them."""
    from rollover.report.record import read_config, refuse_comparison

    require("msgspec", "cryptography", purpose="rollover workers")
    config = read_config(run)  # a folder that no run has made is refused
    refuse_comparison(run, config)  # each of its runs has a swarm of its own
    if (kind := (config.get("engine") or {}).get("kind", "swarm")) != "swarm":
        raise RunError(f"{run} has no swarm: its engine.kind is {kind!r}; only runs with 'swarm' have workers")
    given = [f"--{key}" for key, name in (("add", add), ("revoke", revoke), ("trust", trust)) if name is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} cannot be combined: give one of them at a time")
    if out is not None and add is None:
        raise ConfigError("--out is for the token of a new worker: also give --add NAME")
    if add is not None:
        _add(run / "swarm", add, out)
    if revoke is not None:
        from rollover.swarm.coordinator.trust import Credentials

        Credentials(run / "swarm" / "workers.json").revoke(revoke)
        click.echo(f"the token of {revoke} is rejected from now on")
    if trust is not None:
        _blocklist(run).readmit(trust)
        click.echo(f"{trust} may join again: restart its worker")
    if (add, revoke, trust) == (None, None, None):
        from rollover.swarm.coordinator.status.snapshot import read_status

        _show(run, read_status(run / "swarm"))


def _blocklist(run: Path) -> Blocklist:
    from rollover.swarm.coordinator.trust import Blocklist

    return Blocklist(run / "swarm")


def _add(root: Path, name: str, out: Path | None) -> None:
    from rollover.privacy import make_private
    from rollover.swarm.coordinator.trust import Credentials
    from rollover.swarm.publication.keys import open_key

    if out is not None and out.exists():
        raise ConfigError(f"--out {out}: the file exists; choose another name")
    root.mkdir(parents=True, exist_ok=True)
    if out is not None:
        make_private(out)  # before the name is taken, so that a file that cannot be written changes nothing
    try:
        token = Credentials(root / "workers.json").add(name, open_key(root / "publisher.key").public_key())
    except RolloverError:
        if out is not None:
            out.unlink()
        raise
    if out is None:
        click.echo(token.text)
    else:
        out.write_text(f"{token.text}\n")
    where = "save this line to a file that only you can read" if out is None else f"copy {out} there"
    click.echo(
        f"On the worker's machine: {where}, then: rollover worker --join URL --token-file {out or f'{name}.token'}",
        err=True,
    )


_HEADINGS = ("worker", "state", "version", "lag", "calls", "room", "tokens/s", "decoded", "held", "drift", "note")
_WORDS = ("worker", "state", "note")


def _show(run: Path, status: SwarmStatus) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    age_s = max(0.0, time.time() - status.time_s)
    table = Table(box=None, pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading in _WORDS else "right")
    for w in status.workers:
        numbers = (w.version, w.lag, w.num_calls, w.max_running)
        cells = ["-" if n is None else f"{n:,}" for n in numbers]
        drift = "-" if w.drift is None else f"{w.drift:.2g}"
        decoded = (f"{w.tokens_per_s:,.0f}", f"{w.num_decoded:,}", f"{w.num_held:,}", drift)
        table.add_row(*map(Text, (w.name, w.state, *cells, *decoded, w.note)))
    console = Console(width=None if os.isatty(1) else 160, highlight=False, markup=False)
    console.print(f"{status.url}, weights version {status.version}, as of {age_s:,.0f} s ago")
    if age_s > _SILENT_S:
        console.print("no news from the trainer: the run has ended, was stopped, or hangs; this is its last status")
    elif status.page:
        console.print(f"live page: {status.page}")
    console.print(table if status.workers else "no worker has joined yet")
    for line in _advice(run, status):
        console.print(line)


def _advice(run: Path, status: SwarmStatus) -> Iterator[str]:
    """Yield advice on what the user has to do, if anything."""
    from rollover.swarm.coordinator.status.snapshot import shown

    if not status.workers:
        yield f"create a token for each: rollover workers {run} --add NAME"
    for name, blocked in _blocklist(run).listed().items():
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(blocked.time_s))
        yield (
            f"{name} was sent away on {when}: {shown(blocked.reason)}; once that is fixed, readmit it:"
            f" rollover workers {run} --trust {name}"
        )
    if any(w.state == "full" for w in status.workers):
        yield "a worker that is full is waiting for the trainer's journal: is the journal stuck, or its disk full?"
