"""Reads the command line of a server, which its user writes."""

from __future__ import annotations

from collections.abc import Sequence


def argument(args: Sequence[str], *names: str) -> str | None:
    """Return the value that ``args`` give an option, which may have several names; that of the last mention counts.
    Words may be joined by ``-`` or ``_``. ``None`` where the option is not there, "" where its value is missing.

    Example: ``argument(["--tp", "2", "--tensor_parallel_size=4"], "--tensor-parallel-size", "--tp")`` is "4".
    """
    value = None
    for index, arg in enumerate(args):
        name, equals, after = arg.partition("=")
        if name.replace("_", "-") in names:
            value = after if equals else args[index + 1] if index + 1 < len(args) else ""
    return value
