"""``metrics.jsonl``: one line per step, evaluation and warm-up step.

Invariants: every line on disk is complete or is the last one, so a crash costs at most the line being written; after a
resume, the newer history replaces the older one from the step at which the run resumes. Steps that are repeated then
keep the speed of the first time, since their rollouts are not repeated; it is 0 if they are skipped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, cast, get_args

from rollover.errors import ResourceError, RunError, parse_json
from rollover.report.throughput import TRAINED

FILE_NAME = "metrics.jsonl"

Kind = Literal["step", "eval", "warmup"]

SPEED = ("time/", "perf/", "rollout/tokens_per_s", "reward/late", "reward/work_s", "judge/")
"""Beginnings of the names of what a step measures of its rollouts and its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """Measurements of one step."""

    kind: Kind
    step: int
    """Training step (``step``, ``eval``) or warm-up step (``warmup``), counted from 0."""
    time_s: float
    """Time on the run's clock when the row was written."""
    values: Mapping[str, float]
    """Slash-separated names; NaN where the measurement was not a finite number."""


class Sink(Protocol):
    """A place where rows go besides the file."""

    def write(self, row: MetricRow) -> None: ...

    def write_samples(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Take a table of samples of a step, of texts and numbers."""

    def close(self) -> None: ...


class MetricsWriter:
    """Appends rows to ``run_dir/metrics.jsonl`` and hands them to the sinks. Raises ``ResourceError`` if the line
    cannot be written, most likely because the disk is full."""

    def __init__(self, run_dir: Path, *, sinks: Sequence[Sink] = ()) -> None:
        self.path = run_dir / FILE_NAME
        self._sinks = tuple(sinks)
        _drop_torn_line(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, kind: Kind, step: int, time_s: float, values: Mapping[str, float]) -> None:
        row = MetricRow(kind=kind, step=step, time_s=time_s, values={k: float(v) for k, v in values.items()})
        try:
            self._file.write(_encode(row) + "\n")
            self._file.flush()
        except OSError as e:
            raise ResourceError(f"cannot write {self.path}: {e}; free some disk space, then --resume the run") from e
        for sink in self._sinks:
            sink.write(row)

    def write_samples(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Hand a table of samples to the sinks; it is not in the file, since the journal has all samples."""
        for sink in self._sinks:
            sink.write_samples(step, columns, rows)

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def read_metrics(run_dir: Path) -> tuple[MetricRow, ...]:
    """Return the rows of the run's current history, in the order they were written; empty when there is no file. A row
    that goes back to an earlier step of its kind replaces that step and what had followed it, evaluations of later
    weights included. A torn last line is left out. Raises ``RunError`` if a line before the last is not a metrics row;
    the message names file and line."""
    path = run_dir / FILE_NAME
    if not path.is_file():
        return ()
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    return _newest_history(_decode(line, f"{path}:{i}") for i, line in enumerate(lines, start=1))


def series(rows: Iterable[MetricRow], kind: Kind, name: str) -> tuple[tuple[int, float, float], ...]:
    """Return (step, time_s, value) of every row that holds a finite ``name``."""
    return tuple(
        (r.step, r.time_s, v) for r in rows if r.kind == kind and math.isfinite(v := r.values.get(name, math.nan))
    )


def accuracies_by_dataset(rows: Iterable[MetricRow]) -> list[str]:
    """Return the names of the accuracies that evaluations measured for single datasets, ``accuracy/<dataset>``."""
    names = (name for row in rows if row.kind == "eval" for name in row.values if name.startswith("accuracy/"))
    return list(dict.fromkeys(names))


def standard_error_of(name: str) -> str:
    """Name the standard error of an accuracy or a pass@k."""
    head, slash, dataset = name.partition("/")
    return f"{head}_se{slash}{dataset}"


def _newest_history(rows: Iterable[MetricRow]) -> tuple[MetricRow, ...]:
    kept: list[MetricRow] = []
    last: dict[Kind, int] = {}
    first: dict[int, MetricRow] = {}
    for row in rows:
        if row.step <= last.get(row.kind, -1):
            kept = [r for r in kept if r.kind != row.kind or r.step < row.step]
            if row.kind == "step":
                kept = [r for r in kept if r.kind != "eval" or r.step <= row.step]
        if row.kind == "step" and (earlier := first.setdefault(row.step, row)) is not row:
            speed = {name: value for name, value in earlier.values.items() if name.startswith(SPEED)}
            if not row.values.get(TRAINED.name, math.nan):  # its batch is skipped this time
                speed[TRAINED.name] = 0.0
            row = replace(row, values={**row.values, **speed})
        last[row.kind] = row.step
        kept.append(row)
    return tuple(kept)


def _encode(row: MetricRow) -> str:
    values = {k: v if math.isfinite(v) else None for k, v in row.values.items()}
    return json.dumps({"kind": row.kind, "step": row.step, "time_s": row.time_s, **values}, allow_nan=False)


def _decode(line: bytes, where: str) -> MetricRow:
    try:
        fields: dict[str, Any] = parse_json(line)
        kind, step, time_s = fields.pop("kind"), int(fields.pop("step")), float(fields.pop("time_s"))
        if kind not in get_args(Kind):
            raise ValueError(f"unknown kind {kind!r}")
        values = {k: math.nan if v is None else float(v) for k, v in fields.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as e:
        raise RunError(f"{where} is not a metrics row ({e!r}); remove that line to read the rest") from e
    return MetricRow(kind=cast(Kind, kind), step=step, time_s=time_s, values=values)


def _drop_torn_line(path: Path) -> None:
    """Remove an incomplete last line left by a crash, so that the next row is not appended to it."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
