"""The building blocks of commands: suggestions for misspelt names, config overrides, and types of options."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from rollover.errors import nearest

OVERRIDES = "rollover.overrides"
"""The key under which a context keeps the ``--section.key value`` pairs of a ``ConfiguredCommand``."""


class _Formatter(click.HelpFormatter):
    """Writes help with headings that stand out on a terminal."""

    def write_heading(self, heading: str) -> None:
        self.write(f"{'':>{self.current_indent}}{click.style(f'{heading}:', bold=True)}\n")


class _Context(click.Context):
    formatter_class = _Formatter


class Commands(click.Group):
    """A group of commands that suggests a name for a misspelt one."""

    context_class = _Context

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            raise click.UsageError(f"no command {args[0]!r}{nearest(args[0], self.commands)}", ctx)
        return super().resolve_command(ctx, args)


class ConfiguredCommand(click.Command):
    """A command that accepts ``--section.key value`` as well as its own options, in any order."""

    context_class = _Context
    examples = ("--steps 20", "--rollout.group_size 16 or --tasks.train.0.weight 2")
    """Examples of a key outside all sections, and of keys inside sections."""

    def keys(self) -> list[str]:
        """Return the keys outside all sections, and the sections."""
        from rollover.run.config import RunConfig

        return [f.name for f in fields(RunConfig)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, ctx.meta[OVERRIDES] = self._split(ctx, args)
        return super().parse_args(ctx, own)

    def _split(self, ctx: click.Context, args: Sequence[str]) -> tuple[list[str], list[str]]:
        """Split ``args`` into the command's own arguments and overrides of the config."""
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
        """Reject a name that is neither ``--section.key`` nor a key outside all sections."""
        known = [f"--{key}" for key in self.keys()]
        if "." not in name and name.replace("-", "_") not in [key.replace("-", "_") for key in known]:
            long = [option for option in options if option.startswith("--")]
            raise click.UsageError(f"no option {name!r}{nearest(name, [*long, *known])}", ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        with formatter.section("Configuration"):
            formatter.write_dl(
                [
                    ("--KEY VALUE", f"Set a key outside all sections, as in {self.examples[0]}."),
                    ("--SECTION.KEY VALUE", f"Set any key, as in {self.examples[1]}."),
                ]
            )


class OutputFile(click.Path):
    """A file to write: its folder must exist before the work begins."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        file = Path(str(super().convert(value, param, ctx)))
        try:
            is_there = file.parent.is_dir()
            is_writable = os.access(file if file.exists() else file.parent, os.W_OK)
        except OSError as error:
            self.fail(f"{file}: cannot be written: {error.strerror}", param, ctx)
        if not is_there:
            self.fail(f"{file}: the folder {str(file.parent)!r} does not exist", param, ctx)
        if not is_writable:
            self.fail(f"{file}: may not be written here: choose another place", param, ctx)
        return file


MOST = 10**9
"""The upper bound of every count on the command line."""


class Count(click.IntRange):
    """A whole number that always has an upper bound, so that a mistyped one cannot fill the memory."""

    def __init__(self, min: int, max: int = MOST) -> None:
        super().__init__(min=min, max=max)


class FiniteFloat(click.FloatRange):
    """A number other than ``nan`` and ``inf``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


def listed(kind: type) -> Callable[[click.Context, click.Parameter, str | None], tuple[Any, ...] | None]:
    """Return a callback that parses a comma-separated list."""

    def read(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[Any, ...] | None:
        try:
            parts = None if text is None else tuple(kind(part.strip()) for part in text.split(",") if part.strip())
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a comma-separated list of numbers", ctx, param) from None
        if parts == ():
            raise click.BadParameter(f"{text!r} is an empty list", ctx, param)
        for part in parts or ():
            if isinstance(part, float) and not math.isfinite(part):
                raise click.BadParameter(f"{part} is not a finite number", ctx, param)
        return parts

    return read
