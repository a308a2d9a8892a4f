"""Finding the lengths a user names: a preset, a workload file, a file of lengths, or a run.

A file of lengths is JSONL or Parquet, one row per sample (``length``) or one row per prompt (``lengths``).

    {"prompt": "algebra-17", "length": 5120}
    {"prompt": "algebra-17", "lengths": [5120, 6002, 16384], "prompt_tokens": 212, "finished": [true, true, false]}

``prompt_tokens`` and ``finished`` may be omitted. Error messages name the file and the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollover.errors import ConfigError, DataError, RunError, nearest, parse_json
from rollover.report.record import JOURNAL, read_config, read_timeline, refuse_comparison
from rollover.report.timeline import SampleTrace, Timeline
from rollover.settings import schema, toml
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
        refuse_comparison(path, config)
        raise DataError(f"{path}: the trace is empty; the run has not decoded anything yet")
    try:
        cap_tokens = min(MAX_TOKENS, int(config["rollout"]["max_new_tokens"]))
    except (KeyError, TypeError, ValueError):
        raise RunError(f"{path / 'config.json'} lacks rollout.max_new_tokens: is it the config of a run?") from None
    samples = (timeline or read_timeline(path)).samples
    held = [sum(one.end_s - one.start_s for one in sample.acting) for sample in samples if sample.finished]
    held_s = sum(held) / max(1, len(held))
    return Trace(name=str(path), cap_tokens=cap_tokens, prompts=_by_prompt(samples), held_s=held_s)


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
            unfinished=frozenset(i for i, one in enumerate(decoded) if one.is_cut_short or not one.finished),
        )
        for prompt_id, decoded in prompts.items()
    )


FORMATS = (".jsonl", ".parquet")
COLUMNS = ("prompt", "length", "lengths", "prompt_tokens", "finished")
DEFAULT_PROMPT_TOKENS = 150


def read_file(file: Path, *, cap_tokens: int | None = None) -> Trace:
    """Return the trace in ``file``. Without ``cap_tokens`` the longest response is taken to have met the cap. Raises
    ``DataError`` if the file cannot be read, or one of its rows is invalid."""
    rows = _parquet(file) if file.suffix == ".parquet" else _jsonl(file)
    found: dict[str, tuple[int, list[int], list[bool]]] = {}
    for place, row in rows:
        prompt_id, prompt_tokens, lengths, finished = _prompt(place, row)
        _, its_lengths, its_finished = found.setdefault(prompt_id, (prompt_tokens, [], []))
        its_lengths += lengths
        its_finished += finished
    prompts = tuple(
        TracePrompt(
            prompt_id=prompt_id,
            prompt_tokens=prompt_tokens,
            lengths=tuple(lengths),
            unfinished=frozenset(i for i, f in enumerate(finished) if not f),
        )
        for prompt_id, (prompt_tokens, lengths, finished) in found.items()
    )
    longest = max((n for p in prompts for n in p.lengths), default=1)
    trace = Trace(name=str(file), cap_tokens=max(longest, cap_tokens or 1), prompts=prompts)
    return trace if cap_tokens is None else trace.capped(cap_tokens)


def _jsonl(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{file}:{number}", _parsed(f"{file}:{number}", line)
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None


def _parsed(place: str, line: str) -> Mapping[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise DataError(f"{place}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: expected an object with a prompt and its lengths, got {line.strip()[:60]}")
    return row


def _parquet(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", {key: value for key, value in row.items() if value is not None}
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} is not a readable Parquet file: {error}") from None


def _prompt(place: str, row: Mapping[str, Any]) -> tuple[str, int, list[int], list[bool]]:
    """Return the prompt of a row, its number of tokens, the lengths, and whether each response finished."""
    for key in row:
        if key not in COLUMNS:
            raise DataError(f"{place}: unknown column {key!r}{nearest(key, COLUMNS)}")
    if ("length" in row) == ("lengths" in row):
        raise DataError(f"{place}: a row has either 'length', of one sample, or 'lengths', of all samples of a prompt")
    lengths = row["lengths"] if "lengths" in row else [row["length"]]
    if not isinstance(lengths, list) or not lengths:
        raise DataError(f"{place}: 'lengths' must be a list of at least one whole number, got {lengths!r}")
    if "prompt" not in row and "length" in row:
        raise DataError(f"{place}: a sample's row needs 'prompt', so that siblings can be grouped")
    for length in lengths:
        _check_length(place, length)
    finished = row.get("finished", [True] * len(lengths))
    finished = finished if isinstance(finished, list) else [finished]
    if len(finished) != len(lengths) or not all(isinstance(f, bool) for f in finished):
        raise DataError(f"{place}: 'finished' must be true or false for each of {len(lengths)} lengths")
    prompt_tokens = row.get("prompt_tokens", DEFAULT_PROMPT_TOKENS)
    if type(prompt_tokens) is not int or not 1 <= prompt_tokens <= MAX_TOKENS:
        raise DataError(
            f"{place}: 'prompt_tokens' must be a whole number from 1 to {MAX_TOKENS}, got {prompt_tokens!r:.60}"
        )
    return str(row.get("prompt", place)), prompt_tokens, lengths, finished


def _check_length(place: str, length: object) -> None:
    if type(length) is not int:
        raise DataError(f"{place}: a length must be a whole number of tokens, got {length!r}")
    if length < 1:
        raise DataError(f"{place}: a response must have at least 1 token, got {length}")
    if length > MAX_TOKENS:
        raise DataError(f"{place}: a length of {length!r:.60} is above the maximum of {MAX_TOKENS} tokens")
