"""The closing numbers follow the definitions, and say nothing about what was not measured."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from rollover.batch import WasteCause
from rollover.errors import RunError
from rollover.privacy import HIDDEN
from rollover.report import comparison
from rollover.report.comparison import compare_tables
from rollover.report.metrics import MetricRow
from rollover.report.record import read_run
from rollover.report.run_report import render_report
from rollover.report.summary import Accuracy, summarize, summary_rows, summary_table, took_text
from rollover.report.throughput import of_step
from rollover.report.timeline import Timeline
from rollover.rollout.events import BatchTrained, GroupOpened, SampleFailed
from rollover.rollout.journal import Journal
from rollover.types import Prompt, SampleId
from tests.report.synthetic import Simulation, recorded, write_run
from tests.report.test_timeline import ROLLED_OVER


def _step(step: int, time_s: float, **values: float) -> MetricRow:
    base = {"time/rollout_s": 2.0, "time/train_s": 1.0, "reward/mean": 0.5}
    base |= of_step(trained_tokens=20, decoded_tokens=30, step_s=4.0, decoding_s=2.0)
    return MetricRow(kind="step", step=step, time_s=time_s, values={**base, **values})


def _eval(step: int, accuracy: float) -> MetricRow:
    values = {"accuracy": accuracy, "accuracy_se": 0.02, "accuracy/a": accuracy, "accuracy_se/a": 0.02}
    return MetricRow(kind="eval", step=step, time_s=0.0, values=values)


ROWS = (
    _eval(0, 0.25),
    _step(0, 4.5, **{"memory/peak_bytes": 100.0, "reward/mean": 0.25}),
    _step(1, 8.5, **{"memory/peak_bytes": 90.0, "reward/mean": 0.75}),
    _eval(2, 0.75),
)


def test_the_closing_numbers_of_a_hand_made_run() -> None:
    s = summarize(ROWS, Timeline.of(ROLLED_OVER))
    assert s.num_steps == 2 and s.loop_s == 8.0
    assert s.accuracy_before == Accuracy(step=0, value=0.25, se=0.02)
    assert s.accuracy_after == Accuracy(step=2, value=0.75, se=0.02)
    assert (s.reward_first, s.reward_last) == (0.25, 0.75)
    assert (s.decoded_tokens, s.trained_tokens, s.live_tokens, s.wasted_tokens) == (46, 46, 0, {})
    assert s.rollout_tokens_per_s == 60 / 4.0
    assert s.trained_tokens_per_s == 40 / 8.0
    assert s.resumes_per_sample == 2 / 3
    assert s.phase_s == {"rollout": 4.0, "reward": 0.0, "train": 2.0, "publish": 0.0, "other": 2.0}
    assert s.peak_memory_bytes == 100
    assert s.length_drift == 1.0


def test_throughput_counts_tokens_only_as_far_as_time_was_counted() -> None:
    """The journal of a running run is ahead of its metrics."""
    s = summarize(ROWS[:2], Timeline.of(ROLLED_OVER))
    assert s.trained_tokens == 46
    assert s.rollout_tokens_per_s == 30 / 2.0
    assert s.trained_tokens_per_s == 20 / 4.0
    killed = MetricRow(kind="step", step=2, time_s=9.0, values={"reward/mean": 0.5})
    s = summarize((*ROWS, killed), Timeline.of(ROLLED_OVER))
    assert took_text(s) == "3 steps, 2 of them in 8.0 s" and comparison.ROWS["time per step"](s) == "4.0 s"
    assert took_text(summarize(ROWS, Timeline.of(()))) == "2 steps in 8.0 s"


def test_trained_tokens_are_those_that_had_a_gradient() -> None:
    """Of the 10 and 36 tokens of two batches, the second step trains 29; the first is older than such news."""
    done = BatchTrained(time_s=8.4, step=1, untrained={WasteCause.MASKED_STALE: 4, WasteCause.ZERO_ADVANTAGE: 3})
    s = summarize(ROWS, Timeline.of([*ROLLED_OVER, done]))
    assert (s.trained_tokens, s.live_tokens) == (39, 0)
    assert s.wasted_tokens == {"masked_stale": 4, "zero_advantage": 3}
    rows = dict(summary_rows(s))
    assert rows["wasted by the rollout"] == "0 of 46 tokens (0.0%)"
    assert rows["without a gradient"] == "7 of 46 tokens (15.2%): masked_stale 4, zero_advantage 3"
    skipped = Timeline.of([*ROLLED_OVER, done._replace(untrained={WasteCause.SKIPPED: 36})])
    s, first = summarize(ROWS, skipped), summarize(ROWS, Timeline.of(ROLLED_OVER[:11]))
    assert (s.trained_tokens, s.wasted_tokens, s.decoded_tokens) == (10, {"skipped_batch": 36}, 46)
    assert first.lag and (s.lag, s.trained, s.resumes_per_sample) == (first.lag, first.trained, 0)
    assert {each.waste for each in skipped.samples} == {None, WasteCause.SKIPPED}


def test_failures_are_counted_by_kind_with_a_sample_and_its_reason(tmp_path: Path) -> None:
    write_run(tmp_path, Simulation(num_steps=1))
    texts = [f"turn {i}: it <b> died\x1b[2J, api_key=abcdefgh12345678 (prompt a/{i}@0)" for i in range(3)]
    (tmp_path / "journal.sqlite").unlink()
    journal = Journal(tmp_path / "journal.sqlite")
    journal.append([GroupOpened(99.0, 900, Prompt(prompt_id="a/0@0", token_ids=(1,), text="", source="a"), 5, 1)])
    for i, text in enumerate([*texts, "too late"]):
        journal.append([SampleFailed(100.0, SampleId(900, i), text)])
    journal.append([SampleFailed(100.0, SampleId(900, 4), "none applies", cause=WasteCause.NO_REWARD)])
    journal.close()
    record = read_run(tmp_path)
    *_, number, first, second = summary_rows(summarize(record.metrics, record.timeline))
    died = "turn 0: it <b> died\\x1b[2J, api_key=[hidden] (prompt a/0@0)"
    assert (number, first) == (("failed samples", "4"), ("  3 like g900.0", died))
    assert second == ("  1 like g900.3", "too late")
    assert died.replace("<b>", "&lt;b&gt;") in render_report(record)


def test_a_run_that_measured_nothing_shows_dashes() -> None:
    s = summarize((), Timeline.of(()))
    assert s.accuracy_before is None and s.lag is None and s.trained_tokens_per_s is None
    texts = dict(summary_rows(s))
    assert texts["accuracy before"] == texts["lag"] == texts["time"] == texts["peak memory"] == "–"
    assert texts["wasted by the rollout"] == texts["without a gradient"] == "0 of 0 tokens (0.0%)"


def test_one_evaluation_is_before_and_not_after() -> None:
    s = summarize(ROWS[:1], Timeline.of(()))
    assert s.accuracy_before is not None and s.accuracy_after is None


def test_the_table_shows_every_closing_number(tmp_path: Path) -> None:
    record = read_run(write_run(tmp_path / "april", Simulation(num_steps=4)))
    summary = summarize(record.metrics, record.timeline)
    out = io.StringIO()
    Console(file=out, width=120).print(summary_table(record, summary))
    for name, value in summary_rows(summary):
        assert name in out.getvalue() and value[:40] in out.getvalue()


def test_names_from_data_are_not_read_as_terminal_markup() -> None:
    rows = (MetricRow(kind="eval", step=0, time_s=0.0, values={"accuracy/[/x]": 0.5, "accuracy/[red]b": 0.5}),)
    record, out = recorded((), rows, name="[/run]"), io.StringIO()
    console = Console(file=out, width=120)
    console.print(summary_table(record, summarize(rows, record.timeline)))
    console.print(*compare_tables([record, record], 120))
    for name in ("[/x]", "[red]b", "[/run]:", "[/run] (2)"):
        assert name in out.getvalue()


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"config\.json cannot be read"):
        read_run(tmp_path)


def test_a_run_record_holds_no_secret(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"engine": {"api_key": "sk-1"}, "meta": {"seed": 3}}))
    record = read_run(tmp_path)
    assert record.config == {"engine": {"api_key": HIDDEN}} and record.meta == {"seed": 3}
