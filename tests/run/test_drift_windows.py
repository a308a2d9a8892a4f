"""Who is distrusted for its drift, and after how many tokens: a pure decision over a stream of batches."""

from __future__ import annotations

import math
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.batch import Drift
from rollover.run.engine_trust import MIN_TOKENS, DriftWindows

TOLERANCE = 0.1
"""The bound of half precision, where rounding alone makes up to half of it."""
ROUNDING = 0.05
PER_BATCH = 21
"""Tokens of the newest weights that each of three members has in a batch at ``max_staleness`` 3: few."""


class Members:
    """Batches of a push-pull run: each member's share of tokens that the newest weights sampled."""

    def __init__(self, *, seed: int, **means: float) -> None:
        self._random = np.random.default_rng(seed)
        self.means = means

    def batch(self) -> dict[str, Drift]:
        drift = {}
        for name, mean in self.means.items():
            distances = self._random.exponential(mean, size=int(self._random.integers(0, 2 * PER_BATCH)))
            if len(distances):
                drift[name] = Drift(len(distances), float(distances.mean()))
        return drift


def test_an_engine_is_judged_by_its_mean_over_enough_tokens() -> None:
    drift = {
        "honest": Drift(1000, 1e-5),
        "at the limit": Drift(1000, 0.002),
        "beyond it": Drift(MIN_TOKENS, 0.0021),
        "too few": Drift(MIN_TOKENS - 1, 5.0),
        "no number": Drift(1000, math.nan),
    }
    windows = DriftWindows(0.002)
    assert windows.add(drift).keys() == {"beyond it", "no number"}
    assert windows.add({}) == {}


def test_tokens_of_several_batches_are_judged_together_and_once() -> None:
    windows = DriftWindows(TOLERANCE)
    assert windows.add({"laptop": Drift(40, 0.2)}) == {}
    assert windows.add({"phone": Drift(63, 9.0), "laptop": Drift(23, 0.2)}) == {}
    assert windows.add({"laptop": Drift(0, math.nan)}) == {}, "a batch without such tokens says nothing"
    (found,) = windows.add({"laptop": Drift(37, 0.1)}).values()
    assert found.num_tokens == 100 and found.mean_abs == pytest.approx((63 * 0.2 + 37 * 0.1) / 100)
    assert windows.add({"laptop": Drift(63, 9.0)}) == {}, "the window has started again"


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_false_log_probs_are_found_over_a_few_batches_with_few_tokens(seed: int) -> None:
    windows, members = DriftWindows(TOLERANCE), Members(seed=seed, anna=ROUNDING, bert=ROUNDING, liar=0.2)
    num_tokens = 0
    for _ in range(3 * MIN_TOKENS // PER_BATCH):
        batch = members.batch()
        assert all(found.num_tokens < MIN_TOKENS for found in batch.values())
        num_tokens += batch.get("liar", Drift(0, 0.0)).num_tokens
        if found := windows.add(batch):
            assert found.keys() == {"liar"} and found["liar"].num_tokens == num_tokens
            assert MIN_TOKENS <= num_tokens < MIN_TOKENS + 2 * PER_BATCH
            return
    raise AssertionError("the liar was not found")


def test_honest_members_are_never_found_however_long_the_run() -> None:
    windows, members = DriftWindows(TOLERANCE), Members(seed=0, anna=ROUNDING, bert=ROUNDING, carl=0.8 * ROUNDING)
    for _ in range(10_000):
        assert windows.add(members.batch()) == {}


@pytest.mark.parametrize("num_honest", [1, 10, 63, 64, 1000])
def test_who_begins_to_lie_is_found_with_the_second_window_at_the_latest(num_honest: int) -> None:
    """What it did before weighs at most once, in the window that is open then."""
    windows = DriftWindows(TOLERANCE)
    for _ in range(num_honest):
        assert windows.add({"liar": Drift(1, 0.0)}) == {}
    lies = next(i for i in count(1) if windows.add({"liar": Drift(1, 0.11)}))
    assert lies <= 2 * MIN_TOKENS


def test_dropped_tokens_do_not_count_against_a_returning_member() -> None:
    windows = DriftWindows(TOLERANCE)
    assert windows.add({"liar": Drift(63, 9.0)}) == {}
    windows.forget("liar")
    windows.forget("whoever")
    assert windows.add({"liar": Drift(MIN_TOKENS, 0.01)}) == {}
