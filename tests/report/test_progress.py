"""Progress draws seldom, prints plainly without a terminal, and takes messages literally."""

from __future__ import annotations

import io
import math
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from rollover.report.config import Mode
from rollover.report.progress import Progress


def _progress(
    mode: Mode = "plain", *, terminal: bool = False, total: int = 20, every: int = 5, width: int = 140
) -> tuple[Progress, io.StringIO, SimpleNamespace]:
    out, clock = io.StringIO(), SimpleNamespace(now=0.0)
    console = Console(file=out, force_terminal=terminal, width=width, color_system=None)
    progress = Progress(
        total_steps=total, mode=mode, plain_every_steps=every, console=console, now_s=lambda: float(clock.now)
    )
    return progress, out, clock


METRICS = {"reward/mean": 0.5, "loss": 0.25, "staleness/mean": 1.5, "time/step_s": 2.0}
METRICS |= {"perf/trained_tokens_per_s": 1234.0}


def test_without_a_terminal_there_is_one_line_per_n_steps_and_the_last() -> None:
    progress, out, clock = _progress("auto", total=12)
    with progress:
        for step in range(12):
            progress.rollout(1, 2, 3, 4, 100 * step)
            clock.now += 10.0
            progress.step(METRICS)
    lines = out.getvalue().splitlines()
    assert [line.split("step ")[1].split("/")[0] for line in lines] == ["1", "5", "10", "12"]
    assert lines[1] == "[0:00:50] step 5/12  reward 0.500  lag 1.50  1,234 tok/s trained  loss 0.250"


def test_a_line_has_the_means_since_the_line_before() -> None:
    progress, out, _ = _progress(total=10)
    for step in range(10):
        progress.step({**METRICS, "reward/mean": float(step), "loss": -float(step)})
    said = [line.split("reward ")[1].split("  ")[0] for line in out.getvalue().splitlines()]
    assert said == ["0.000", "2.500", "7.000"], "step 0; steps 1 to 4; steps 5 to 9"
    assert "loss -7.000" in out.getvalue().splitlines()[-1]


def test_a_line_counts_the_rewards_that_were_late() -> None:
    progress, out, _ = _progress(every=2)
    for late in (0.0, 0.0, 3.0, 1.0):
        progress.step({**METRICS, "reward/late": late})
    lines = out.getvalue().splitlines()
    assert "late" not in lines[0] + lines[1] and lines[2].endswith("loss 0.250  4 rewards late")


@pytest.mark.parametrize("width", [80, 100, 140])
def test_on_a_narrow_terminal_counts_and_times_stay_whole(width: int) -> None:
    progress, out, _ = _progress("bars", terminal=True, total=2000, width=width)
    with progress:
        progress.step(METRICS | {"reward/mean": 0.123})
    line = next(line for line in reversed(out.getvalue().splitlines()) if "train" in line)
    assert "1/2000" in line
    assert "-:--" in line or re.search(r"\d\d:\d\d", line), "the time left"
    assert "reward 0.123  lag 1.50  1,234 tok/s trained" in line
    assert len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)) <= width


@pytest.mark.parametrize("step_s", [1.0, 60.0])
def test_the_time_left_is_shown_however_long_a_step_takes(step_s: float) -> None:
    progress, out, clock = _progress("bars", terminal=True, total=14)
    with progress:
        for _ in range(4):
            clock.now += step_s
            progress.step(METRICS)
    assert {1.0: "00:10", 60.0: "10:00"}[step_s] in out.getvalue()


def test_a_resumed_run_counts_on() -> None:
    progress, out, _ = _progress(total=12)
    progress.resumed(9)
    progress.step({})
    assert "step 10/12" in out.getvalue()


def test_warm_up_prints_a_tenth_at_a_time() -> None:
    progress, out, _ = _progress()
    for step in range(1, 101):
        progress.warmup(step, 100, 3.0 / step)
    assert len(out.getvalue().splitlines()) == 10
    assert out.getvalue().splitlines()[-1].endswith("warm-up 100/100  loss 0.030")


def test_bars_are_redrawn_no_more_often_than_the_refresh_rate() -> None:
    progress, out, clock = _progress("bars", terminal=True)
    with progress:
        for tick in range(1000):
            clock.now = tick / 1000
            progress.rollout(tick // 100, 16, 40, 8, tick)
    assert 8 <= out.getvalue().count("rollout") <= 8 + 3


def test_the_rollout_rate_counts_from_the_start_of_its_step() -> None:
    progress, out, clock = _progress("bars", terminal=True)
    with progress:
        progress.rollout(0, 4, 8, 0, 1000)
        clock.now = 2.0
        progress.rollout(2, 4, 8, 3, 2000)
        assert "8 running · 3 parked · 500 tok/s" in out.getvalue()
        progress.step(METRICS)
        clock.now = 10.0
        progress.rollout(0, 4, 8, 0, 2000)
        clock.now = 11.0
        progress.rollout(1, 4, 8, 0, 2300)
        assert "300 tok/s" in out.getvalue()


def test_an_evaluation_names_every_accuracy_with_its_standard_error() -> None:
    progress, out, _ = _progress()
    values = {"accuracy": 0.5, "accuracy/a": 0.4, "pass@4/a": 0.9}
    errors = {"accuracy_se": 0.02, "accuracy_se/a": 0.03, "pass@4_se/a": 0.054}
    progress.evaluation(7, values | errors)
    told = "eval at step 7  accuracy 0.500 ± 0.020  accuracy/a 0.400 ± 0.030  pass@4/a 0.900 ± 0.054\n"
    assert out.getvalue() == told


def test_a_line_leaves_out_what_was_not_measured() -> None:
    progress, out, _ = _progress(total=1)
    progress.step({"loss": 0.5, "staleness/mean": math.nan, "reward/mean": math.nan})
    assert out.getvalue().endswith("step 1/1  loss 0.500\n")


def test_messages_are_not_read_as_markup() -> None:
    progress, out, _ = _progress()
    progress.message("[red]prompt[/red] [/nonsense]")
    assert out.getvalue() == "[red]prompt[/red] [/nonsense]\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_off_prints_nothing(terminal: bool) -> None:
    progress, out, _ = _progress("off", terminal=terminal)
    with progress:
        progress.warmup(1, 1, 0.1)
        progress.evaluating(1, 1)
        progress.rollout(1, 1, 0, 0, 5)
        progress.step(METRICS)
        progress.evaluation(0, {"accuracy": 1.0})
        progress.message("hello")
    assert out.getvalue() == ""
    progress.result("model: [here]")
    assert out.getvalue() == "model: [here]\n", "an answer is no progress"
