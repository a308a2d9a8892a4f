"""The destinations of metrics besides the file: TensorBoard, Weights & Biases, Trackio.

Training and evaluation keep their metric names; warm-up rows get the prefix ``warmup/``, because their steps
count something else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rollover.errors import ResourceError, require
from rollover.privacy import redacted
from rollover.report.config import LoggingConfig
from rollover.report.metrics import MetricRow, Sink, read_metrics

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


def open_sinks(
    config: LoggingConfig,
    run_dir: Path,
    *,
    run_config: Mapping[str, Any],
    identity: str,
    resume_step: int | None = None,
) -> tuple[Sink, ...]:
    """Open one sink per tracker switched on. ``run_config`` is sent along with secrets blanked. ``identity`` is a name
    that no other run has. ``resume_step`` is the training step from which a resumed run continues: what an earlier
    process wrote at that step and after is superseded, but for the evaluation of the weights that it continues from.
    Raises ``MissingExtra`` if the tracker's package is not installed."""
    name = config.run_name or run_dir.resolve().name
    sinks: list[Sink] = []
    if config.tensorboard:
        require("tensorboard", purpose="logging.tensorboard = true")
        sinks.append(TensorBoardSink(run_dir / "tensorboard", resume_step=resume_step))
    if config.wandb is not None:
        sinks.append(WandbSink(config.wandb, name, identity, run_dir, redacted(run_config)))
    if config.trackio is not None:
        # Runs of one name are one run there.
        sinks.append(TrackioSink(config.trackio, f"{name}-{identity.rpartition('-')[2]}", redacted(run_config)))
    return tuple(sinks)


class TensorBoardSink:
    """Event files written through TensorBoard's own writer, which needs neither torch nor TensorFlow.

    Warm-up goes to a folder of its own (another "run" on the page), because the purge after a resume would
    take its steps for training steps.
    """

    def __init__(self, log_dir: Path, *, resume_step: int | None = None) -> None:
        # The package is heavy enough to keep out of `--help`.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._writer_type = Event, Summary, EventFileWriter
        self._log_dir = log_dir
        self._warmup: EventFileWriter | None = None
        self._writer: EventFileWriter = self._open(log_dir)
        if resume_step is not None:
            # Readers drop what earlier files hold at this step and later.
            self._writer.add_event(Event(step=resume_step, session_log=SessionLog(status=SessionLog.START)))
            for row in read_metrics(log_dir.parent):
                if row.kind == "eval" and row.step == resume_step:
                    self.write(row)

    def write(self, row: MetricRow) -> None:
        values = [self._summary.Value(tag=k, simple_value=v) for k, v in tagged(row).items()]
        event = self._event(wall_time=time.time(), step=row.step, summary=self._summary(value=values))
        with self._on_disk():
            if row.kind != "warmup":
                self._writer.add_event(event)
                return
            if self._warmup is None:
                self._warmup = self._open(self._log_dir / "warmup")
            self._warmup.add_event(event)

    def write_samples(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Do nothing: TensorBoard has no tables."""

    def close(self) -> None:
        with self._on_disk():
            self._writer.close()
            if self._warmup is not None:
                self._warmup.close()

    @contextmanager
    def _on_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise ResourceError(
                f"cannot write {self._log_dir}: {e}; free some disk space, then --resume the run"
            ) from e

    def _open(self, folder: Path) -> EventFileWriter:
        return self._writer_type(str(folder), flush_secs=10)


class WandbSink:
    """Weights & Biases. Its own step counter only goes up; ours is logged as a metric and made the x axis."""

    def __init__(self, project: str, name: str, identity: str, run_dir: Path, run_config: Mapping[str, Any]) -> None:
        wandb = _tracker("wandb")
        self._table = wandb.Table
        self._run = wandb.init(
            project=project,
            name=name,
            id=identity,
            resume="allow",
            dir=str(run_dir),
            config=dict(run_config),
            settings={"x_disable_meta": True},  # it would send the command line as it was typed, secrets and all
        )
        self._run.define_metric("*", step_metric="train_step")
        self._run.define_metric("warmup/*", step_metric="warmup_step")

    def write(self, row: MetricRow) -> None:
        axis = "warmup_step" if row.kind == "warmup" else "train_step"
        self._run.log({axis: row.step, **tagged(row)})

    def write_samples(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        table = self._table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({"train_step": step, "samples": table})

    def close(self) -> None:
        self._run.finish()


class TrackioSink:
    """Trackio, the local-first tracker of the Hugging Face stack."""

    def __init__(self, project: str, name: str, run_config: Mapping[str, Any]) -> None:
        trackio = _tracker("trackio")
        self._table = trackio.Table
        self._run = trackio.init(project=project, name=name, resume="allow", config=dict(run_config))

    def write(self, row: MetricRow) -> None:
        self._run.log(tagged(row), step=row.step)

    def write_samples(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        table = self._table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()


def tagged(row: MetricRow) -> dict[str, float]:
    """Return the row's finite values under the names that trackers see."""
    prefix = "warmup/" if row.kind == "warmup" else ""
    return {prefix + k: v for k, v in row.values.items() if math.isfinite(v)}


def _tracker(package: str) -> ModuleType:
    require(package, purpose=f"logging.{package}")
    return import_module(package)
