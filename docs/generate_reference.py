"""Writes ``reference/cli.md`` from the commands' own help and ``reference/api.md`` from the public names.

``make docs`` runs it; a test fails while a page is stale.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

import rollover
from rollover.cli import cli

FOLDER = Path(__file__).parent / "reference"
GROUPS = {
    "run": "Runs",
    "rollout": "Scheduling",
    "engine": "Engines",
    "trainer": "Training",
    "algorithms": "Algorithms",
    "types": "Records",
    "errors": "Errors",
}
"""The heading under which the page lists the public names of each package."""
INTRODUCTION = """\
These names make up the public interface: import them from `rollover` itself, as in `from rollover import Scheduler`.
They are imported on first use, so `import rollover` is instant and needs no PyTorch. Everything else may change between
versions."""
WIDTH = 100
"""Characters per line of help."""


def render_cli() -> str:
    """Return the page of the command line: the output of ``--help`` for each command."""
    sections = "\n\n".join(
        f"## `{name}`\n\n```text\n{text.strip()}\n```" for name, text in _helps("rollover", cli, None)
    )
    return f"# Command line\n\n<!-- Written by docs/generate_reference.py. -->\n\n{sections}\n"


def _helps(name: str, command: click.Command, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    """Yield the full name and the help of ``command`` and of each command below it."""
    settings = {**command.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    context = click.Context(command, parent, name, color=False, **settings)
    yield context.command_path, click.unstyle(command.get_help(context))
    if isinstance(command, click.Group):
        for part, inner in command.commands.items():
            yield from _helps(part, inner, context)


def render_api() -> str:
    """Return the page of the public names, which mkdocstrings fills with their docstrings."""
    lines = ["# Python", "", "<!-- Written by docs/generate_reference.py. -->", "", INTRODUCTION]
    for room, heading in GROUPS.items():
        lines += ["", f"## {heading}"]
        for name, module in rollover.PUBLIC_MODULES.items():
            if module.split(".")[0] == room:
                lines += ["", f"::: rollover.{module}.{name}"]
    return "\n".join(lines) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "cli.md").write_text(render_cli(), encoding="utf-8")
    (FOLDER / "api.md").write_text(render_api(), encoding="utf-8")


if __name__ == "__main__":
    main()
