"""Trained tokens/s mean the same everywhere: tokens over wall-clock, of whatever stretch of steps."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from rollover.report import run_figures, throughput
from rollover.report.comparison import ROWS
from rollover.report.progress import Progress
from rollover.report.summary import summarize
from rollover.report.throughput import DECODED, TRAINED, means
from tests.report.synthetic import recorded, steps

ROUND = ((12_000, 2.0), (2_000, 0.25), (1_000, 0.25), (1_000, 0.1))
"""Tokens and seconds of four batches from one round: the first has the longest responses and all of the wait."""


def rounds(count: int) -> list[dict[str, float]]:
    return [
        throughput.of_step(
            trained_tokens=tokens, decoded_tokens=16_000 if wait else 0, step_s=s, decoding_s=1.6 if wait else 0.0
        )
        for _ in range(count)
        for (tokens, s), wait in zip(ROUND, (True, False, False, False), strict=True)
    ]


TRUE = 16_000 / 2.6
"""Trained tokens/s of rounds, however many."""


def test_a_step_that_decodes_nothing_has_no_speed_and_counts_for_none() -> None:
    row = throughput.of_step(trained_tokens=300, decoded_tokens=0, step_s=4.0, decoding_s=0.0)
    assert row["rollout/tokens_per_s"] == 0.0
    assert DECODED.over([row]) is None
    other = throughput.of_step(trained_tokens=300, decoded_tokens=400, step_s=4.0, decoding_s=2.0)
    assert DECODED.over([row, other]) == 200.0


def test_speeds_are_tokens_over_seconds_and_the_lag_is_a_mean_over_batches() -> None:
    first = throughput.of_step(trained_tokens=300, decoded_tokens=1, step_s=1.0, decoding_s=1.0)
    second = throughput.of_step(trained_tokens=100, decoded_tokens=1, step_s=3.0, decoding_s=1.0)
    first |= {"staleness/mean": 0.0, "reward/mean": 0.2}
    second |= {"staleness/mean": 2.0, "reward/mean": 0.8}
    found = means([first, second])
    assert found[TRAINED.name] == 100.0
    assert found["staleness/mean"] == pytest.approx(1.0), "as in the closing table"
    assert found["reward/mean"] == pytest.approx(0.5)
    speed = throughput.of_step(trained_tokens=0, decoded_tokens=1, step_s=1.0, decoding_s=1.0)
    assert means([{**speed, "staleness/mean": 2.0}])["staleness/mean"] == 2.0, "although nothing had a gradient"
    assert math.isnan(means([{"loss": math.nan}])["loss"])


def test_runs_that_wrote_the_rollouts_seconds_alone_are_read() -> None:
    assert DECODED.over([{"rollout/tokens_per_s": 10.0, "time/rollout_s": 2.0}]) == 10.0


@pytest.mark.parametrize("every", [4, 8, 20])
def test_plain_lines_say_the_true_throughput_whatever_the_phase_of_rounds(every: int) -> None:
    """A line in step with the rounds would else always show the same fast or slow batch."""
    out = io.StringIO()
    progress = Progress(total_steps=40, mode="plain", plain_every_steps=every, console=Console(file=out, width=120))
    progress.resumed(0)
    for step in rounds(10):
        progress.step(step)
    lines = out.getvalue().splitlines()[2:]  # the first step has a line of its own
    said = [float(line.rsplit("  ", 1)[1].split(" ")[0].replace(",", "")) for line in lines]
    assert said[1:] == pytest.approx([TRUE] * (40 // every - 1), abs=1), "whole rounds each"
    first = [(t, s) for t, s in (ROUND * 10)[1:every]]
    assert said[0] == pytest.approx(sum(t for t, _ in first) / sum(s for _, s in first), abs=1)


def test_every_place_that_names_it_says_the_same() -> None:
    """The closing table, the comparison, the figure's level, the progress line and the rows themselves."""
    record = recorded((), steps(*rounds(10)))
    s = summarize(record.metrics, record.timeline)
    assert s.trained_tokens_per_s == pytest.approx(TRUE)
    assert s.rollout_tokens_per_s == pytest.approx(16_000 / 1.6)
    assert ROWS["trained tokens/s, whole loop"](s) == f"{TRUE:,.0f}"
    drawn = run_figures.throughput(record)
    assert drawn is not None
    (curve,) = (d for d in drawn["data"] if d["name"].startswith("trained"))
    assert min(curve["y"]) > TRUE * 0.7 and max(curve["y"]) < TRUE * 1.5, "no single step's speed, which is 5 times off"
