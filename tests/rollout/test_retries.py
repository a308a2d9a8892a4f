"""Retries of failed generation calls."""

from __future__ import annotations

import pytest

from rollover.rollout.retries import Retries
from rollover.types import SampleId

A, B, C = (SampleId(0, i) for i in range(3))


def test_retries_without_a_token_are_limited_and_each_token_resets() -> None:
    retries = Retries(2)
    assert [retries.failed(A) for _ in range(3)] == [True, True, False]
    retries.decoded(A)
    assert [retries.failed(A) for _ in range(3)] == [True, True, False]
    assert retries.failed(B), "a sample's failures are its own"
    assert not Retries(0).failed(A)


def test_the_back_off_doubles_from_a_tenth_of_a_second_to_ten() -> None:
    retries = Retries(9999)
    assert retries.back_off_s(A) == 0.0
    waits = []
    for _ in range(9):
        retries.failed(A)
        waits.append(retries.back_off_s(A))
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0])
    for _ in range(2000):
        retries.failed(A)
    assert retries.back_off_s(A) == 10.0
    retries.decoded(A)
    assert retries.back_off_s(A) == 0.0


def test_all_are_failing_when_several_are_and_none_got_a_token_since() -> None:
    retries = Retries(3)
    retries.failed(A)
    assert not retries.all_failing(set()), "it may be the sample"
    retries.failed(B)
    assert retries.all_failing({A, B}) and retries.all_failing({A}) and retries.all_failing(set())
    assert not retries.all_failing({A, C})
    retries.decoded(B)
    assert not retries.all_failing({A, B}) and not retries.all_failing(set())
