"""Trackers get the same numbers as the file, and no secrets."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollover.errors import MissingExtra
from rollover.privacy import HIDDEN
from rollover.report.config import LoggingConfig
from rollover.report.metrics import MetricsWriter
from rollover.report.sinks import open_sinks


def _scalars(log_dir: Path, tag: str) -> list[tuple[int, float]]:
    found = EventAccumulator(str(log_dir))
    found.Reload()
    return [(e.step, round(e.value, 5)) for e in found.Scalars(tag)]


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, sinks=open_sinks(LoggingConfig(), tmp_path, run_config={})) as writer:
        writer.write("warmup", 5, 0.1, {"loss": 2.0})
        writer.write("eval", 0, 0.2, {"accuracy/sums": 0.25})
        writer.write("step", 0, 1.0, {"reward/mean": 0.5, "loss": math.nan})
        writer.write("step", 1, 2.0, {"reward/mean": 0.75, "loss": 0.5})
    log_dir = tmp_path / "tensorboard"
    assert _scalars(log_dir, "reward/mean") == [(0, 0.5), (1, 0.75)]
    assert _scalars(log_dir, "loss") == [(1, 0.5)]
    assert _scalars(log_dir, "accuracy/sums") == [(0, 0.25)]
    assert _scalars(log_dir / "warmup", "warmup/loss") == [(5, 2.0)]


def test_tensorboard_shows_a_resumed_run_as_one_history(tmp_path: Path) -> None:
    for resume_step, values in ((None, {0: 0.0, 1: 0.1, 2: 0.2}), (1, {1: 1.0})):
        sinks = open_sinks(LoggingConfig(), tmp_path, run_config={}, resume_step=resume_step)
        with MetricsWriter(tmp_path, sinks=sinks) as writer:
            for step, value in values.items():
                writer.write("step", step, float(step), {"reward/mean": value})
    assert _scalars(tmp_path / "tensorboard", "reward/mean") == [(0, 0.0), (1, 1.0)]


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_a_missing_tracker_says_which_extra_to_install(
    tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    chosen: dict[str, Any] = {tracker: "project"}
    config = LoggingConfig(tensorboard=False, **chosen)
    with pytest.raises(MissingExtra, match=rf"pip install 'rollover\[{tracker}\]'"):
        open_sinks(config, tmp_path, run_config={})


class _Run:
    """Stands in for a tracker's run."""

    def __init__(self, **init: Any) -> None:
        self.init = init
        self.rows: list[tuple[dict[str, float], int | None]] = []
        self.finished = False

    def define_metric(self, name: str, step_metric: str) -> None: ...

    def log(self, row: dict[str, float], step: int | None = None) -> None:
        self.rows.append((row, step))

    def finish(self) -> None:
        self.finished = True


def _fake_tracker(monkeypatch: pytest.MonkeyPatch, name: str) -> list[_Run]:
    runs: list[_Run] = []

    def init(**settings: Any) -> _Run:
        runs.append(_Run(**settings))
        return runs[-1]

    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=init))
    return runs


def test_wandb_gets_our_step_as_the_axis_of_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = _fake_tracker(monkeypatch, "wandb")
    config = LoggingConfig(tensorboard=False, wandb="april", run_name="first")
    secret = {"engine": {"api_key": "sk-123"}}
    with MetricsWriter(tmp_path, sinks=open_sinks(config, tmp_path, run_config=secret)) as writer:
        writer.write("warmup", 3, 0.0, {"loss": 1.0})
        writer.write("step", 0, 1.0, {"loss": 0.5})
    assert runs[0].init["project"] == "april" and runs[0].init["name"] == "first"
    assert runs[0].init["config"] == {"engine": {"api_key": HIDDEN}}
    assert runs[0].init["settings"] == {"x_disable_meta": True}, "W&B would send the command line as it was typed"
    assert runs[0].rows == [
        ({"warmup_step": 3, "warmup/loss": 1.0}, None),
        ({"train_step": 0, "loss": 0.5}, None),
    ]
    assert runs[0].finished


def test_one_run_directory_is_one_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = _fake_tracker(monkeypatch, "wandb")
    config = LoggingConfig(tensorboard=False, wandb="april", run_name="same")
    for folder in ("a", "a", "b"):
        open_sinks(config, tmp_path / folder, run_config={})
    assert runs[0].init["id"] == runs[1].init["id"] != runs[2].init["id"]


def test_trackio_gets_rows_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = _fake_tracker(monkeypatch, "trackio")
    config = LoggingConfig(tensorboard=False, trackio="april")
    with MetricsWriter(tmp_path, sinks=open_sinks(config, tmp_path, run_config={})) as writer:
        writer.write("step", 4, 1.0, {"loss": 0.5})
    assert runs[0].init["name"] == tmp_path.name
    assert runs[0].rows == [({"loss": 0.5}, 4)]


@pytest.mark.parametrize("wrong", [{"plain_every_steps": 0}, {"wandb": " "}, {"trackio": ""}])
def test_settings_that_cannot_work_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"logging.{next(iter(wrong))}"):
        LoggingConfig(**wrong)
