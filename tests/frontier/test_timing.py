from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from rollover.frontier.timing import Segments, fit_iterations

NUM_SAMPLES = 80


def stepped(c0_s: float, b0: float, start_s: float) -> tuple[Segments, float]:
    """An engine in small steps: samples come at random, wait ``start_s`` (longer in a large batch), decode, and go.
    Also how long they waited on average."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(5, 200, NUM_SAMPLES)
    arrivals = np.sort(rng.uniform(0, 400 * c0_s, NUM_SAMPLES)).tolist()
    step_s = c0_s / 20
    waits: dict[int, float] = {}
    left: dict[int, float] = {}
    ends: dict[int, float] = {}
    now_s, active = 0.0, [(0.0, 0)]
    while len(ends) < NUM_SAMPLES:
        while len(waits) < NUM_SAMPLES and arrivals[len(waits)] <= now_s:
            left[len(waits)] = float(lengths[len(waits)])
            waits[len(waits)] = start_s * (1 + len(left) / b0)
        active.append((now_s, len(left)))
        decoded = step_s / (c0_s * (1 + len(left) / b0))
        now_s += step_s
        for i in list(left):
            if now_s - arrivals[i] > waits[i]:
                left[i] -= decoded
            if left[i] <= 0:
                del left[i]
                ends[i] = now_s
    rows = [(arrivals[i], ends[i], int(lengths[i]), True) for i in range(NUM_SAMPLES)]
    return Segments.of(rows, active, now_s), statistics.fmean(waits.values())


def test_an_engine_is_recognised_by_its_segments() -> None:
    fit = fit_iterations(stepped(0.01, 15, 0.0)[0])
    assert fit is not None
    assert fit.c0_s == pytest.approx(0.01, rel=0.03)
    assert fit.b0 == pytest.approx(15, rel=0.05)
    assert fit.start_s < 0.01
    assert fit.error < 0.02


def test_the_time_before_the_first_token_is_told_apart() -> None:
    segments, wait_s = stepped(0.01, 15, 0.2)
    fit = fit_iterations(segments)
    assert fit is not None
    assert fit.c0_s == pytest.approx(0.01, rel=0.1)
    assert fit.b0 == pytest.approx(15, rel=0.2)
    assert fit.start_s == pytest.approx(wait_s, rel=0.1)


def test_iterations_of_one_speed_have_no_b0() -> None:
    fit = fit_iterations(stepped(0.01, 1e9, 0.0)[0])
    assert fit is not None
    assert fit.b0 == math.inf
    assert fit.c0_s == pytest.approx(0.01, rel=0.02)


def test_times_that_do_not_grow_with_tokens_tell_nothing() -> None:
    rows = [(float(i), float(i) + 1.0, 1 + 37 * i % 300, True) for i in range(40)]
    assert fit_iterations(Segments.of(rows, [(0.0, 1)], 41.0)) is None
