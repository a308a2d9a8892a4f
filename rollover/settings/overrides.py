"""Reads the ``--section.key value`` pairs of a command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollover.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One ``--section.key value`` of the command line.

    Example: ``--rollout.group_size 16`` is ``Override(path=("rollout", "group_size"), text="16")``.
    """

    path: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return "--" + ".".join(self.path)


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """Parse ``["--a.b", "1", "--c=2"]`` into overrides."""
    overrides = []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--") or argument == "--":
            raise ConfigError(f"command line: unexpected {argument!r}; overrides are --section.key value")
        name, has_value, text = argument[2:].partition("=")
        if not has_value:
            text = next(rest, "--")
            if text.startswith("--"):
                raise ConfigError(f"command line: --{name} needs a value: --{name} VALUE")
        path = tuple(name.split("."))
        if not all(path):
            raise ConfigError(f"command line: {argument!r} is not a key; overrides are --section.key value")
        overrides.append(Override(path=path, text=text))
    return overrides
