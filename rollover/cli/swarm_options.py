"""Options that the commands of a swarm's other machines share: how they reach the coordinator, and trust it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
FILE = click.Path(path_type=Path)
"""A file that may or may not be there: whoever opens it says so."""


def join(help_text: str) -> Callable[[F], F]:
    """Return the option that names the coordinator, as ``url``."""
    return click.option("--join", "url", required=True, metavar="URL", help=help_text)


def token_file(help_text: str) -> Callable[[F], F]:
    """Return the option that names the file of a token, as ``token_file``."""
    return click.option("--token-file", type=FILE, metavar="FILE", help=help_text)


def ca_file() -> Callable[[F], F]:
    """Return the option that names the certificates by which the coordinator is trusted, as ``ca_file``."""
    text = "Trust the coordinator by the certificates in FILE (PEM), not by the system's."
    return click.option("--ca-file", type=FILE, metavar="FILE", help=text)


def insecure(help_text: str) -> Callable[[F], F]:
    """Return the flag that allows what others on the way could read, as ``insecure``."""
    return click.option("--insecure", is_flag=True, help=help_text)
