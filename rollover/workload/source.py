"""Finding the lengths a user names: a preset, a workload file, a file of lengths, or a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rollover.errors import ConfigError, DataError, nearest
from rollover.settings import schema, toml
from rollover.workload.files import FORMATS, read_file
from rollover.workload.law import MAX_TOKENS, LengthLaw
from rollover.workload.presets import ALIASES, PRESETS
from rollover.workload.runs import is_run, read_run
from rollover.workload.trace import Trace

Lengths = LengthLaw | Trace
"""Either makes a ``Workload`` from a seed, and can be sent to another process."""


def read_lengths(name: str, *, cap_tokens: int | None = None) -> Lengths:
    """Read the lengths that ``name`` stands for: a directory is a run, ``.toml`` a workload file, ``.jsonl`` and
    ``.parquet`` are recorded lengths, anything else is a preset. ``cap_tokens`` shortens what is longer.

    Raises:
        ConfigError: there is no such preset or file, or the workload file contains a mistake.
        DataError: a length is impossible.
        RunError: the directory is not that of a run.
    """
    _check_cap(cap_tokens)
    path = Path(name)
    if path.is_dir():
        found: Lengths = read_run(path)
    elif path.suffix == ".toml":
        found = read_law(path)
    elif path.suffix in FORMATS:
        return read_file(path, cap_tokens=cap_tokens)
    else:
        found = preset(name)
    return capped(found, cap_tokens)


def read_trace(name: str, *, cap_tokens: int | None = None) -> Trace:
    """Read recorded lengths from a run, or from a JSONL or Parquet file.

    Raises:
        DataError, RunError: as ``read_lengths``, and where ``name`` is neither.
    """
    path = Path(name)
    if not is_run(path) and (path.suffix not in FORMATS or path.is_dir()):
        what = "is neither a run directory nor" if path.exists() else "does not exist; give a run directory or"
        raise DataError(f"{name} {what} a file of lengths ({', '.join(FORMATS)})")
    found = read_lengths(name, cap_tokens=cap_tokens)
    assert isinstance(found, Trace)
    return found


def preset(name: str) -> LengthLaw:
    found = PRESETS.get(ALIASES.get(name, name))
    if found is None:
        raise ConfigError(
            f"unknown workload {name!r}: it is not a preset{nearest(name, [*PRESETS, *ALIASES])}"
            " (nor a run directory, a .toml workload, or .jsonl or .parquet lengths)"
        )
    return found


def read_law(file: Path) -> LengthLaw:
    """Read a workload file: the keys of ``LengthLaw``; with ``preset``, keys that are left out are the preset's."""
    document = toml.read(file)
    base = document.data.pop("preset", None)
    if base is not None:
        if not isinstance(base, str):
            raise ConfigError(
                f"{file}:{document.lines['preset',]}: preset: expected the name of a preset, got {base!r}"
            )
        try:
            defaults = asdict(preset(base))
        except ConfigError as error:
            raise ConfigError(f"{file}:{document.lines['preset',]}: preset: {error}") from None
        document.data.update({key: value for key, value in defaults.items() if key not in document.data})
    return schema.build(LengthLaw, document)


def capped(lengths: Lengths, cap_tokens: int | None) -> Lengths:
    """Return the same responses under another cap, if there is one; raises ``ConfigError`` for an impossible cap."""
    _check_cap(cap_tokens)
    return lengths if cap_tokens is None else lengths.capped(cap_tokens)


def _check_cap(cap_tokens: int | None) -> None:
    if cap_tokens is not None and cap_tokens > MAX_TOKENS:
        raise ConfigError(f"a cap of {cap_tokens} tokens is above the maximum of {MAX_TOKENS} tokens")
