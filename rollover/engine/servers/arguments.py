"""Reads the command line of a server, which its user writes."""

from __future__ import annotations

from collections.abc import Sequence

from rollover.errors import ConfigError

_SIZES = (
    ("--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
    ("--pipeline-parallel-size", "-pp", "--pp-size", "--pp"),
    ("--data-parallel-size", "-dp", "--dp-size", "--dp"),
)
"""Arguments of vLLM and SGLang that multiply the GPUs of a server, each under all its names."""


def argument(args: Sequence[str], *names: str) -> str | None:
    """Return the value that ``args`` give an option, which may have several names; that of the last mention counts.
    Words may be joined by ``-`` or ``_``. ``None`` if the option is not there, "" where its value is missing.

    Example: ``argument(["--tp", "2", "--tensor_parallel_size=4"], "--tensor-parallel-size", "--tp")`` is "4".
    """
    value = None
    for index, arg in enumerate(args):
        name, equals, after = arg.partition("=")
        if name.replace("_", "-") in names:
            value = after if equals else args[index + 1] if index + 1 < len(args) else ""
    return value


def num_devices(args: Sequence[str]) -> int:
    """Read from a server's arguments how many GPUs it takes: tensor x pipeline x data parallel size.

    Example: ``num_devices(["--tensor-parallel-size", "4", "--pp=2"])`` is 8, ``num_devices([])`` is 1.

    Raises ``ConfigError`` for a size that is no whole number above 0.
    """
    total = 1
    for names in _SIZES:
        if (text := argument(args, *names)) is None:
            continue
        if not text.isdecimal() or int(text) < 1:
            also = ", ".join(names[1:])
            raise ConfigError(
                f"engine.launch_args: {names[0]} (or {also}) must be followed by a number of devices, got {text!r}"
            )
        total *= int(text)
    return total
