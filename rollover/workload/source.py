"""Finding the lengths a user names: a preset, a workload file, a file of lengths, or a run."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from rollover.errors import ConfigError, DataError, nearest
from rollover.settings import schema, toml
from rollover.workload.files import FORMATS, read_file
from rollover.workload.law import MAX_TOKENS, LengthLaw
from rollover.workload.presets import ALIASES, PRESETS
from rollover.workload.runs import is_run, read_run
from rollover.workload.trace import Trace, TracePrompt

Lengths = LengthLaw | Trace
"""Both make a ``Workload`` of a seed, and both can be sent to another process."""


def read_lengths(name: str, *, cap_tokens: int | None = None) -> Lengths:
    """Read the lengths that ``name`` stands for: a directory is a run, ``.toml`` a workload file, ``.jsonl`` and
    ``.parquet`` are recorded lengths, anything else is a preset. ``cap_tokens`` shortens what is longer.

    Raises:
        ConfigError: no such preset or file, or a workload file with a mistake in it.
        DataError: lengths that cannot be.
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
    return found if cap_tokens is None else capped(found, cap_tokens)


def read_trace(name: str, *, cap_tokens: int | None = None) -> Trace:
    """Recorded lengths: of a run, or of a JSONL or Parquet file.

    Raises:
        DataError, RunError: as ``read_lengths``; also where ``name`` is neither.
    """
    _check_cap(cap_tokens)
    path = Path(name)
    if path.suffix in FORMATS and not path.is_dir():
        return read_file(path, cap_tokens=cap_tokens)
    if not is_run(path):
        what = "is neither a run directory nor" if path.exists() else "does not exist; name a run directory or"
        raise DataError(f"{name} {what} a file of lengths ({', '.join(FORMATS)})")
    trace = read_run(path)
    return trace if cap_tokens is None else capped_trace(trace, cap_tokens)


def preset(name: str) -> LengthLaw:
    found = PRESETS.get(ALIASES.get(name, name))
    if found is None:
        raise ConfigError(
            f"no workload {name!r}: it is no preset{nearest(name, [*PRESETS, *ALIASES])}"
            " (nor a run directory, a .toml workload, or .jsonl or .parquet lengths)"
        )
    return found


def read_law(file: Path) -> LengthLaw:
    """A workload file: the keys of ``LengthLaw``; with ``preset``, those left out are the preset's."""
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


def capped(lengths: Lengths, cap_tokens: int) -> Lengths:
    """The same responses under another cap; raises ``ConfigError`` for one that cannot be."""
    _check_cap(cap_tokens)
    if isinstance(lengths, Trace):
        return capped_trace(lengths, cap_tokens)
    return replace(lengths, cap_tokens=cap_tokens, min_tokens=min(lengths.min_tokens, cap_tokens))


def _check_cap(cap_tokens: int | None) -> None:
    if cap_tokens is not None and cap_tokens > MAX_TOKENS:
        raise ConfigError(f"a cap of {cap_tokens} tokens is above the longest that can be, {MAX_TOKENS} tokens")


def capped_trace(trace: Trace, cap_tokens: int) -> Trace:
    """The same responses, cut at ``cap_tokens``.

    Raises:
        ConfigError: the cap is above the recorded one: nobody knows how long the responses would have become.
    """
    if cap_tokens > trace.cap_tokens:
        raise ConfigError(
            f"the cap of {cap_tokens} tokens is above {trace.cap_tokens}, under which {trace.name} was recorded;"
            " fit a law to it and raise the law's cap_tokens"
        )
    return replace(trace, cap_tokens=cap_tokens, prompts=tuple(_cut(p, cap_tokens) for p in trace.prompts))


def _cut(prompt: TracePrompt, cap_tokens: int) -> TracePrompt:
    at_cap = {i for i in prompt.unfinished if prompt.lengths[i] >= cap_tokens}
    lengths = tuple(min(n, cap_tokens) for n in prompt.lengths)
    return replace(prompt, lengths=lengths, unfinished=prompt.unfinished - at_cap)
