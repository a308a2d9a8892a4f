"""The metrics file survives crashes and resumes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rollover.errors import RunError
from rollover.report.metrics import MetricRow, MetricsWriter, read_metrics, series
from rollover.report.throughput import DECODED, TRAINED


def _steps(rows: tuple[MetricRow, ...], kind: str = "step") -> list[tuple[int, float]]:
    return [(r.step, r.values["reward/mean"]) for r in rows if r.kind == kind]


def _write(run_dir: Path, rewards: dict[int, float], *, time_s: float = 0.0) -> None:
    with MetricsWriter(run_dir) as writer:
        for step, reward in rewards.items():
            writer.write("step", step, time_s + step, {"reward/mean": reward})


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write("warmup", 0, 0.5, {"loss": 2.25})
        writer.write("eval", 0, 1.0, {"accuracy": 0.125, "accuracy/sums": 0.125})
        writer.write("step", 0, 2.0, {"reward/mean": 0.1})
    assert read_metrics(tmp_path) == (
        MetricRow(kind="warmup", step=0, time_s=0.5, values={"loss": 2.25}),
        MetricRow(kind="eval", step=0, time_s=1.0, values={"accuracy": 0.125, "accuracy/sums": 0.125}),
        MetricRow(kind="step", step=0, time_s=2.0, values={"reward/mean": 0.1}),
    )


def test_each_row_is_on_disk_before_the_next(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write("step", 0, 1.0, {"loss": 1.0})
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row == {"kind": "step", "step": 0, "time_s": 1.0, "loss": 1.0}
    writer.close()


@pytest.mark.parametrize("cut", range(1, 40, 19))
def test_a_torn_last_line_costs_that_line_alone_and_later_rows_are_whole(tmp_path: Path, cut: int) -> None:
    _write(tmp_path, {0: 0.1, 1: 0.2})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert _steps(read_metrics(tmp_path)) == [(0, 0.1)]
    _write(tmp_path, {1: 0.3, 2: 0.4})
    assert _steps(read_metrics(tmp_path)) == [(0, 0.1), (1, 0.3), (2, 0.4)]


def test_a_resumed_history_replaces_the_old_one_from_its_first_step(tmp_path: Path) -> None:
    _write(tmp_path, {0: 0.0, 1: 0.1, 2: 0.2, 3: 0.3})
    with MetricsWriter(tmp_path) as writer:
        for version, accuracy in enumerate([7.0, 7.1, 7.2]):
            writer.write("eval", version, 9.0, {"reward/mean": accuracy})
    _write(tmp_path, {1: 1.1, 2: 1.2}, time_s=10.0)
    rows = read_metrics(tmp_path)
    assert _steps(rows) == [(0, 0.0), (1, 1.1), (2, 1.2)]
    assert _steps(rows, "eval") == [(0, 7.0), (1, 7.1)]  # the weights of version 2 are not those of this history


def test_a_repeated_step_keeps_the_speed_of_the_time_that_decoded_its_batch(tmp_path: Path) -> None:
    for steps, step_s, speed in ((range(4), 10.0, 50.0), (range(2, 3), 1.0, 500.0), (range(2, 6), 2.0, 300.0)):
        values = {"loss": step_s, "reward/late": step_s, TRAINED.name: speed, DECODED.name: speed}
        seconds = dict.fromkeys(("time/step_s", "time/decoding_s"), step_s)
        with MetricsWriter(tmp_path) as writer:
            for step in steps:
                writer.write("step", step, 0.0, {**values, **seconds})
    rows = [row.values for row in read_metrics(tmp_path)]
    assert [values["loss"] for values in rows] == [10, 10, 2, 2, 2, 2]
    assert [values["reward/late"] for values in rows] == [10, 10, 10, 10, 2, 2]
    assert TRAINED.over(rows) == DECODED.over(rows) == (50 * 40 + 300 * 4) / 44
    with MetricsWriter(tmp_path) as writer:
        writer.write("step", 5, 0.0, {TRAINED.name: 0.0, "time/step_s": 0.01})  # skipped
        writer.write("step", 6, 0.0, {"loss": 1.0})  # decoded by a process that wrote no row
    rows = [row.values for row in read_metrics(tmp_path)]
    assert (TRAINED.over(rows), DECODED.over(rows)) == ((50 * 40 + 300 * 2) / 44, (50 * 40 + 300 * 4) / 44)


def test_numbers_that_are_not_finite_stay_valid_json_and_read_as_nan(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write("step", 0, 1.0, {"loss": math.nan, "grad_norm": math.inf, "lr": 0.5})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    rows = read_metrics(tmp_path)
    assert math.isnan(rows[0].values["loss"]) and math.isnan(rows[0].values["grad_norm"])
    assert series(rows, "step", "loss") == () and series(rows, "step", "lr") == ((0, 1.0, 0.5),)


OTHER, FAR = '{"kind": "other", "step": 1, "time_s": 0}', '{"kind": "step", "step": 1e400, "time_s": 0}'


@pytest.mark.parametrize("bad", ["{}", "[1]", "not json", OTHER, FAR])
def test_a_damaged_line_is_named_with_file_and_number(tmp_path: Path, bad: str) -> None:
    _write(tmp_path, {0: 0.1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(bad + "\n")
    _write(tmp_path, {1: 0.1})
    with pytest.raises(RunError, match=r"metrics\.jsonl:2 is not a metrics row"):
        read_metrics(tmp_path)
