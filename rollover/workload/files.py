"""Traces from files: JSONL or Parquet, one row per sample (``length``) or one row per prompt (``lengths``).

    {"prompt": "algebra-17", "length": 5120}
    {"prompt": "algebra-17", "lengths": [5120, 6002, 16384], "prompt_tokens": 212, "finished": [true, true, false]}

``prompt_tokens`` and ``finished`` may be omitted. Error messages name the file and the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollover.errors import DataError, nearest, parse_json
from rollover.workload.law import MAX_TOKENS
from rollover.workload.trace import Trace, TracePrompt

FORMATS = (".jsonl", ".parquet")
COLUMNS = ("prompt", "length", "lengths", "prompt_tokens", "finished")
DEFAULT_PROMPT_TOKENS = 150


def read_file(file: Path, *, cap_tokens: int | None = None) -> Trace:
    """Return the trace in ``file``. Without ``cap_tokens`` the longest response is taken to have met the cap. Raises
    ``DataError`` if the file cannot be read, or one of its rows is invalid."""
    rows = _parquet(file) if file.suffix == ".parquet" else _jsonl(file)
    prompts: dict[str, TracePrompt] = {}
    longest = 1
    for place, row in rows:
        prompt = _prompt(place, row, cap_tokens)
        longest = max(longest, *prompt.lengths)
        before = prompts.get(prompt.prompt_id)
        prompts[prompt.prompt_id] = prompt if before is None else _joined(before, prompt)
    return Trace(name=str(file), cap_tokens=cap_tokens or longest, prompts=tuple(prompts.values()))


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


def _prompt(place: str, row: Mapping[str, Any], cap_tokens: int | None) -> TracePrompt:
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
        _check_length(place, length, cap_tokens)
    finished = row.get("finished", [True] * len(lengths))
    finished = finished if isinstance(finished, list) else [finished]
    if len(finished) != len(lengths) or not all(isinstance(f, bool) for f in finished):
        raise DataError(f"{place}: 'finished' must be true or false for each of {len(lengths)} lengths")
    prompt_tokens = row.get("prompt_tokens", DEFAULT_PROMPT_TOKENS)
    if type(prompt_tokens) is not int or not 1 <= prompt_tokens <= MAX_TOKENS:
        raise DataError(
            f"{place}: 'prompt_tokens' must be a whole number from 1 to {MAX_TOKENS}, got {prompt_tokens!r:.60}"
        )
    return TracePrompt(
        prompt_id=str(row.get("prompt", place)),
        prompt_tokens=prompt_tokens,
        lengths=tuple(lengths),
        unfinished=frozenset(i for i, f in enumerate(finished) if not f),
    )


def _check_length(place: str, length: object, cap_tokens: int | None) -> None:
    if type(length) is not int:
        raise DataError(f"{place}: a length must be a whole number of tokens, got {length!r}")
    if length < 1:
        raise DataError(f"{place}: a response must have at least 1 token, got {length}")
    if length > MAX_TOKENS:
        raise DataError(f"{place}: a length of {length!r:.60} is above the maximum of {MAX_TOKENS} tokens")
    if cap_tokens is not None and length > cap_tokens:
        raise DataError(f"{place}: a response of {length} tokens is longer than the cap of {cap_tokens}")


def _joined(before: TracePrompt, more: TracePrompt) -> TracePrompt:
    shift = len(before.lengths)
    return TracePrompt(
        prompt_id=before.prompt_id,
        prompt_tokens=before.prompt_tokens,
        lengths=before.lengths + more.lengths,
        unfinished=before.unfinished | {shift + i for i in more.unfinished},
    )
