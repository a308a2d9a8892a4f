"""Noise that is moved a little."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.engine.noise import seeds_around, uniforms


def number(seed: int, position: int) -> float:
    return float(uniforms([seed], [position])[0])


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 10**6), distance=st.floats(1e-4, 0.1))
def test_seeds_around_lie_at_the_distance_or_a_little_beyond(seed: int, position: int, distance: float) -> None:
    here = number(seed, position)
    low, high = seeds_around(seed, position, distance)
    for found, moved in ((low, here - distance), (high, here + distance)):
        if found is None:
            assert not 1e-3 < moved < 1 - 1e-3
        else:
            assert 0 <= found < 2**63
            assert abs(number(found, position) - moved) < 1e-3
    if low is not None:
        assert number(low, position) <= here - distance
    if high is not None:
        assert number(high, position) >= here + distance


def mixed(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 10**6))
def test_the_noise_is_what_the_protocol_page_says(seed: int, position: int) -> None:
    golden = 0x9E3779B97F4A7C15
    bits = mixed((mixed((seed + golden) % 2**64) + (position + 1) * golden) % 2**64)
    assert number(seed, position) == ((bits >> 12) + 0.5) / 2**52
    assert number(7, 0) == pytest.approx(0.7215081806049702, rel=1e-15)
