"""Options shared by the commands for a swarm's other machines: how they reach the coordinator and trust it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
FILE = click.Path(path_type=Path)
"""A file that may not exist; the code that opens it reports that."""


def join(help_text: str) -> Callable[[F], F]:
    """Return the option that names the coordinator, as ``url``."""
    return click.option("--join", "url", required=True, metavar="URL", help=help_text)


def token_file(help_text: str) -> Callable[[F], F]:
    """Return the option that names a token file, as ``token_file``."""
    return click.option("--token-file", type=FILE, metavar="FILE", help=help_text)


def ca_file() -> Callable[[F], F]:
    """Return the option that names the certificates to verify the coordinator with, as ``ca_file``."""
    text = "Verify the coordinator with the certificates in FILE (PEM) instead of the system's."
    return click.option("--ca-file", type=FILE, metavar="FILE", help=text)


def insecure(help_text: str) -> Callable[[F], F]:
    """Return the flag that allows unencrypted connections, as ``insecure``."""
    return click.option("--insecure", is_flag=True, help=help_text)
