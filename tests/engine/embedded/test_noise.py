"""The noise of seeded engines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.engine.embedded.sampler import uniforms


def number(seed: int, position: int) -> float:
    return float(uniforms([seed], [position])[0])


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
