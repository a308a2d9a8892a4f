"""Long runs are drawn as means over stretches with a band that holds most of their steps; short ones as they are."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from rollover.report.run_figures import MAX_POINTS, band, coarsened, stretches, x_title


@pytest.mark.parametrize("count", [151, 300, 2000, 12345])
def test_a_band_holds_four_fifths_of_a_stretch_and_the_curve_its_means(count: int) -> None:
    noise = random.Random(7)
    x, y = [float(i) for i in range(count)], [noise.gauss(0.0, 1.0) for _ in range(count)]
    parts = stretches(y)
    (area,) = band(x, y, "--blue")
    assert len(parts) <= MAX_POINTS and [v for part in parts for v in part] == y
    high, low = area["y"][: len(parts)], area["y"][len(parts) :][::-1]
    assert all(fmean(lo <= v <= hi for v in p) > 0.6 for p, lo, hi in zip(parts[:-1], low, high, strict=False))
    inside = sum(lo <= v <= hi for part, lo, hi in zip(parts, low, high, strict=True) for v in part)
    assert 0.7 < inside / count <= 1.0
    assert coarsened(x, y)[1] == pytest.approx([fmean(part) for part in parts], rel=1e-5)


def test_a_short_curve_is_drawn_as_it_is() -> None:
    x, y = [float(i) for i in range(MAX_POINTS)], [i % 7 / 3 for i in range(MAX_POINTS)]
    assert coarsened(x, y) == (x, y) and band(x, y, "--blue") == []
    assert x_title(MAX_POINTS) == "training step"


def test_a_constant_stays_one() -> None:
    assert coarsened([0.0] * 2000, [0.4] * 2000)[1] == [0.4] * len(stretches(range(2000)))


def test_an_axis_says_how_many_steps_a_point_stands_for() -> None:
    assert x_title(2000) == "training step (means over 14)"
    assert len(stretches(range(2000))[0]) == 14
