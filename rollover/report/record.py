"""The contents of a run directory, from which the reports are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollover.errors import RunError, parse_json, printable
from rollover.privacy import Redactor
from rollover.report.metrics import MetricRow, read_metrics
from rollover.report.timeline import Timeline
from rollover.rollout.journal import read_events

JOURNAL = "journal.sqlite"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run as recorded in its directory. Secrets in the config and in the reasons of failures are blanked."""

    name: str
    config: Mapping[str, Any]
    meta: Mapping[str, Any]
    """Version, git commit, seed and machine."""
    metrics: tuple[MetricRow, ...]
    timeline: Timeline


def read_run(run_dir: Path) -> RunRecord:
    """Read a finished, running or interrupted run; whatever has not been written yet is empty. Raises ``RunError`` if
    it is not a run directory, or one of its files is damaged."""
    config = read_config(run_dir)
    refuse_comparison(run_dir, config)
    meta = config.pop("meta")
    redactor, timeline = Redactor(config), read_timeline(run_dir)
    failures = (f._replace(reason=printable(" ".join(redactor.text(f.reason).split()))) for f in timeline.failures)
    return RunRecord(
        name=run_dir.resolve().name,
        config=redactor.value(config),
        meta=redactor.value(meta),
        metrics=read_metrics(run_dir),
        timeline=replace(timeline, failures=tuple(failures)),
    )


def read_config(run_dir: Path) -> dict[str, Any]:
    """Read the resolved config, with version, seed and machine under ``meta``. Raises ``RunError`` if there is none, it
    cannot be read, or it was not written by a run."""
    path = run_dir / "config.json"
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{run_dir} is not a run directory: it has no config.json") from None
    except ValueError as e:
        raise RunError(f"{path} cannot be read: {e}") from e
    if not isinstance(config.get("meta"), dict):
        raise RunError(f"{run_dir} is not a run directory: its config.json was not written by a run")
    return config


def refuse_comparison(run_dir: Path, config: Mapping[str, Any]) -> None:
    """Raise ``RunError`` with the runs of a comparison, if this is one."""
    if runs := compared_runs(run_dir, config):
        raise RunError(f"{run_dir} is a comparison; give one of its runs: {' or '.join(map(str, runs))}")


def compared_runs(run_dir: Path, config: Mapping[str, Any]) -> list[Path]:
    """Return the directories of the runs of a comparison; none of another run."""
    return [run_dir / name for name in config.get("variants") or ()]


def read_timeline(run_dir: Path) -> Timeline:
    """Read the timeline that the journal tells; it is empty until there is a journal. Raises ``RunError`` if it is not
    a journal."""
    journal = run_dir / JOURNAL
    if not journal.is_file():
        return Timeline.of(())
    try:
        return Timeline.of(event for _, event in read_events(journal, effective=True, tokens=False))
    except LookupError as e:
        raise RunError(
            f"{journal} lacks an event that later ones follow from ({e!r}): bring the file back from a copy"
        ) from e
