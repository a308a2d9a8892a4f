"""Trackers get the same numbers as the file, and no secrets."""

from __future__ import annotations

import errno
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rollover.batch import Batch, Group
from rollover.errors import MissingExtra, ResourceError
from rollover.privacy import HIDDEN, redacted_text
from rollover.report.config import LoggingConfig
from rollover.report.metrics import MetricsWriter, Sink
from rollover.report.samples import of_batch, table_rows
from rollover.report.sinks import open_sinks
from rollover.run.observers import StepEnded, samples_to
from rollover.types import FinishReason, Prompt, SampleId, Segment, Trajectory
from tests.environments.words import char_tokenizer, ids


def _scalars(log_dir: Path, tag: str) -> list[tuple[int, float]]:
    found = EventAccumulator(str(log_dir))
    found.Reload()
    return [(e.step, round(e.value, 5)) for e in found.Scalars(tag)]


def opened(
    run_dir: Path, *, run_config: Any = None, identity: str = "run-1f", resume_step: int | None = None, **chosen: Any
) -> tuple[Sink, ...]:
    config = LoggingConfig(**chosen)
    return open_sinks(config, run_dir, run_config=run_config or {}, identity=identity, resume_step=resume_step)


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, sinks=opened(tmp_path)) as writer:
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
        with MetricsWriter(tmp_path, sinks=opened(tmp_path, resume_step=resume_step)) as writer:
            for step, value in values.items():
                writer.write("step", step, float(step), {"reward/mean": value})
                if resume_step is None:
                    writer.write("eval", step, float(step), {"accuracy": value})
    assert _scalars(tmp_path / "tensorboard", "reward/mean") == [(0, 0.0), (1, 1.0)]
    assert _scalars(tmp_path / "tensorboard", "accuracy") == [(0, 0.0), (1, 0.1)], "of the weights that it goes on from"


def test_a_full_disk_is_told_by_tensorboard_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    [sink] = opened(tmp_path)
    writer = MetricsWriter(tmp_path, sinks=[sink])
    with monkeypatch.context() as patch:
        patch.setattr(EventFileWriter, "add_event", full)
        patch.setattr(EventFileWriter, "close", full)
        for act in (lambda: writer.write("step", 0, 1.0, {"loss": 0.5}), writer.close):
            with pytest.raises(ResourceError, match=r"cannot write .*/tensorboard: .*No space left.*; free some disk"):
                act()
    sink.close()


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_a_missing_tracker_names_its_extra(tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    with pytest.raises(MissingExtra, match=rf"pip install 'rollover\[{tracker}\]'"):
        opened(tmp_path, tensorboard=False, **{tracker: "project"})


class _Run:
    """Stands in for a tracker's run."""

    def __init__(self, **init: Any) -> None:
        self.init = init
        self.rows: list[tuple[dict[str, Any], int | None]] = []
        self.finished = False

    def define_metric(self, name: str, step_metric: str) -> None: ...

    def log(self, row: dict[str, Any], step: int | None = None) -> None:
        self.rows.append((row, step))

    def finish(self) -> None:
        self.finished = True


def _fake_tracker(monkeypatch: pytest.MonkeyPatch, name: str) -> list[_Run]:
    runs: list[_Run] = []

    def init(**settings: Any) -> _Run:
        runs.append(_Run(**settings))
        return runs[-1]

    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=init, Table=_Table))
    return runs


class _Table:
    """Stands in for ``wandb.Table`` (0.31) and ``trackio.Table`` (0.43), which begin with the same arguments."""

    def __init__(self, columns: list[str], data: list[list[Any]]) -> None:
        self.rows = [dict(zip(columns, row, strict=True)) for row in data]


def test_wandb_gets_our_step_as_the_axis_of_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = _fake_tracker(monkeypatch, "wandb")
    secret = {"engine": {"api_key": "sk-123"}}
    sinks = opened(tmp_path, run_config=secret, tensorboard=False, wandb="april", run_name="first")
    with MetricsWriter(tmp_path, sinks=sinks) as writer:
        writer.write("warmup", 3, 0.0, {"loss": 1.0})
        writer.write("step", 0, 1.0, {"loss": 0.5})
    assert runs[0].init["project"] == "april" and runs[0].init["name"] == "first"
    assert runs[0].init["config"] == {"engine": {"api_key": HIDDEN}}
    assert runs[0].init["settings"] == {"x_disable_meta": True}, "W&B would send the command line as it was typed"
    assert runs[0].rows == [({"warmup_step": 3, "warmup/loss": 1.0}, None), ({"train_step": 0, "loss": 0.5}, None)]
    assert runs[0].finished


@pytest.mark.parametrize(("tracker", "key"), [("wandb", "id"), ("trackio", "name")])
def test_two_identities_are_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str, key: str) -> None:
    runs = _fake_tracker(monkeypatch, tracker)
    for identity in ("sync-1f", "sync-1f", "sync-2e"):
        opened(tmp_path, identity=identity, tensorboard=False, **{tracker: "april"})
    assert runs[0].init[key] == runs[1].init[key] != runs[2].init[key]


def test_trackio_gets_rows_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = _fake_tracker(monkeypatch, "trackio")
    with MetricsWriter(tmp_path, sinks=opened(tmp_path, tensorboard=False, trackio="april")) as writer:
        writer.write("step", 4, 1.0, {"loss": 0.5})
    assert runs[0].init["name"] == f"{tmp_path.name}-1f"
    assert runs[0].rows == [({"loss": 0.5}, 4)]


@pytest.mark.parametrize(("tracker", "axis", "step"), [("wandb", {"train_step": 20}, None), ("trackio", {}, 20)])
def test_trackers_get_the_samples_of_every_tenth_step_as_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str, axis: dict[str, int], step: int | None
) -> None:
    runs = _fake_tracker(monkeypatch, tracker)
    prompt = Prompt(prompt_id="sums/4@0", token_ids=ids("1+8"), text="1+8", source="sums")
    parked = Segment(18, ids("x "), (-0.5, -0.5), FinishReason.ABORT, 18, 0.0, 1.0)
    resumed = Segment(20, ids("hf_" + 16 * "a"), (-0.5,) * 19, FinishReason.STOP, 20, 2.0, 3.0)
    trajectories = (
        Trajectory(sample_id=SampleId(3, 0), prompt=prompt, segments=(parked, resumed), reward=1.0),
        Trajectory(sample_id=SampleId(3, 1), prompt=prompt, segments=(resumed,), reward=0.0),
    )
    batch = Batch(step=20, groups=(Group(group_id=3, prompt=prompt, trajectories=trajectories),))
    with MetricsWriter(tmp_path, sinks=opened(tmp_path, **{tracker: "april"})) as writer:
        observe = samples_to(
            writer, 10, lambda b: table_rows(of_batch(b, lambda n: 0.0), char_tokenizer(), redacted_text)
        )
        for number in (19, 20):
            observe(StepEnded(step=number, batch=batch, time_s=0.0, metrics={"reward/mean": 0.5}))
        observe(StepEnded(step=30, batch=batch, time_s=0.0, metrics={}))  # skipped
    ((logged, at),) = runs[0].rows
    table = logged.pop("samples")
    assert (logged, at) == (axis, step)
    (first, second) = table.rows
    assert (first["sample"], first["reward"], first["against its group"]) == ("g3.0", 1.0, 0.5)
    assert first["interruptions"] == "after 2 tokens: parked, version 18 → 20"
    assert first["response"] == "x [hidden]" and second["response"] == "[hidden]"


@pytest.mark.parametrize(
    "wrong", [{"samples_every_steps": -1}, {"plain_every_steps": 0}, {"wandb": " "}, {"trackio": ""}]
)
def test_settings_that_cannot_work_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"logging.{next(iter(wrong))}"):
        LoggingConfig(**wrong)
