"""Finding the lengths a user names: a preset, a workload file, a file of lengths, or a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from rollover.errors import ConfigError, DataError, RunError, nearest
from rollover.report.record import JOURNAL, read_config, read_timeline
from rollover.report.timeline import SampleTrace, Timeline
from rollover.settings import schema, toml
from rollover.workload.files import FORMATS, read_file
from rollover.workload.law import MAX_TOKENS, LengthLaw
from rollover.workload.trace import Trace, TracePrompt

PRESETS: dict[str, LengthLaw] = {
    # Reasoning models distilled from R1, 1.5B, on competition mathematics.
    "r1-16k": LengthLaw(
        median_tokens=4500, sigma=0.85, icc=0.5, loop_probability=0.03, cap_tokens=16384, min_tokens=64
    ),
    # Qwen3-4B thinking.
    "qwen3-16k": LengthLaw(
        median_tokens=7000, sigma=0.60, icc=0.6, loop_probability=0.02, cap_tokens=16384, min_tokens=64
    ),
    # A tail as heavy as a 32k budget lets it be.
    "heavy-32k": LengthLaw(
        median_tokens=4000, sigma=1.10, icc=0.5, loop_probability=0.02, cap_tokens=32768, min_tokens=64
    ),
    # Short answers that seldom hit the cap.
    "light-8k": LengthLaw(
        median_tokens=1200, sigma=0.60, icc=0.5, loop_probability=0.003, cap_tokens=8192, min_tokens=64
    ),
}
ALIASES = {"math-16k": "r1-16k"}
"""Names of purposes, each with the preset that it stands for."""


Lengths = LengthLaw | Trace
"""Either makes a ``Workload`` from a seed, and can be sent to another process."""


def read_lengths(name: str, *, cap_tokens: int | None = None) -> Lengths:
    """Read the lengths that ``name`` stands for: a directory is a run, ``.toml`` a workload file, ``.jsonl`` and
    ``.parquet`` are recorded lengths, anything else is a preset. ``cap_tokens`` shortens what is longer.

    Raises:
        ConfigError: there is no such preset or file, or the workload file contains a mistake.
        DataError: a length is impossible.
        RunError: the directory is not a run's.
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
    """Read recorded lengths from a run, or from a JSONL or Parquet file. Raises as ``read_lengths``, and
    ``DataError`` if ``name`` is neither."""
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


def is_run(path: Path) -> bool:
    return (path / "config.json").is_file()


def read_run(path: Path, timeline: Timeline | None = None) -> Trace:
    """Return the trace of the run in ``path``, capped at its ``max_new_tokens``; ``timeline`` is read if it is not
    given.

    Raises:
        RunError: it is not a run directory, or its journal cannot be read.
        DataError: nothing has been decoded in it yet.
    """
    config = read_config(path)
    if not (path / JOURNAL).is_file():
        variants = [str(path / name) for name in config.get("variants") or () if (path / name / JOURNAL).is_file()]
        if variants:
            raise RunError(f"{path} is a comparison; give one of its runs: {', '.join(variants)}")
        raise DataError(f"{path}: the trace is empty; the run has not decoded anything yet")
    try:
        cap_tokens = min(MAX_TOKENS, int(config["rollout"]["max_new_tokens"]))
    except (KeyError, TypeError, ValueError):
        raise RunError(f"{path / 'config.json'} lacks rollout.max_new_tokens: is it the config of a run?") from None
    return Trace(name=str(path), cap_tokens=cap_tokens, prompts=_by_prompt((timeline or read_timeline(path)).samples))


def _by_prompt(samples: Iterable[SampleTrace]) -> tuple[TracePrompt, ...]:
    """Return the prompts in the order of their first group; samples that decoded nothing say nothing and are left
    out."""
    prompts: dict[str, list[SampleTrace]] = {}
    for sample in samples:
        if sample.num_tokens:
            prompts.setdefault(sample.prompt_id, []).append(sample)
    return tuple(
        TracePrompt(
            prompt_id=prompt_id,
            prompt_tokens=decoded[0].num_prompt_tokens,
            lengths=tuple(sample.num_tokens for sample in decoded),
            unfinished=frozenset(i for i, sample in enumerate(decoded) if not sample.finished),
        )
        for prompt_id, decoded in prompts.items()
    )
