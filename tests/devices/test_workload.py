"""Length buckets against counting."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.devices.costs.passes import longest_tokens
from rollover.devices.workload import length_buckets, specify
from rollover.errors import DataError, PlanError
from rollover.workload.source import PRESETS
from rollover.workload.trace import Trace, TracePrompt

SAMPLES = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@given(SAMPLES, st.integers(1, 4), st.integers(1, 6))
def test_the_longest_of_a_group_is_that_of_drawing_every_group(lengths: list[int], group_size: int, num: int) -> None:
    buckets = length_buckets(lengths, group_size=group_size, num_groups=1, num_buckets=num)
    longest = [max(group) for group in itertools.product(lengths, repeat=group_size)]
    assert sum(b.group_share * b.group_tokens for b in buckets) == pytest.approx(np.mean(longest))
    low = 0
    for bucket in buckets:
        inside = [n for n in longest if low < n <= bucket.max_tokens]
        assert bucket.group_share == pytest.approx(len(inside) / len(longest))
        assert not inside or bucket.group_tokens == pytest.approx(np.mean(inside))
        low = bucket.max_tokens


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=200), st.integers(1, 10))
def test_no_sample_and_no_token_is_lost(lengths: list[int], num_buckets: int) -> None:
    buckets = length_buckets(lengths, group_size=2, num_groups=3, num_buckets=num_buckets)
    assert len(buckets) <= num_buckets
    assert sum(b.share for b in buckets) == pytest.approx(1)
    assert sum(b.batch_share for b in buckets) == pytest.approx(1)
    assert sum(b.share * b.tokens for b in buckets) == pytest.approx(np.mean(lengths))
    assert buckets[-1].max_tokens == max(lengths)
    assert all(a.max_tokens < b.tokens for a, b in itertools.pairwise(buckets))


def test_the_long_end_is_cut_finest() -> None:
    shares = [b.share for b in length_buckets(range(1, 1025), group_size=1, num_groups=1, num_buckets=8)]
    assert shares == [1 / 4, 1 / 4, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 64]


def test_siblings_that_resemble_one_another_are_taken_as_they_are() -> None:
    rows = [[10, 10], [20, 20], [30, 30], [40, 40]]
    alike = length_buckets(rows, group_size=2, num_groups=2, num_buckets=4)
    mixed = length_buckets(np.ravel(rows), group_size=2, num_groups=2, num_buckets=4)
    assert sum(b.group_share * b.group_tokens for b in alike) == pytest.approx(25)
    assert sum(b.group_share * b.group_tokens for b in mixed) == pytest.approx(31.25)
    pairs = [max(a, b) for a, b in itertools.product([10, 20, 30, 40], repeat=2)]
    assert sum(b.batch_share * b.batch_tokens for b in alike) == pytest.approx(np.mean(pairs))


@pytest.mark.parametrize("lengths", [[], [5, 0], [3, -1]])
def test_lengths_that_cannot_be_are_refused(lengths: list[int]) -> None:
    with pytest.raises(DataError, match="at least"):
        length_buckets(lengths, group_size=1, num_groups=1)


@pytest.mark.parametrize("group_size", [0, 5_000_000])
def test_groups_that_cannot_be_drawn_are_refused(group_size: int) -> None:
    with pytest.raises(PlanError, match=f"group_size must be at (least 1|most 4096), got {group_size}"):
        specify("light-8k", PRESETS["light-8k"], num_groups=1, group_size=group_size)


def test_a_long_trace_is_read_to_its_end() -> None:
    """Rows of three sources, one after the other; one prompt is far longer than the others, and one response."""
    lengths = [200] * 3000 + [12_000] * 6000
    lengths[4001] = 15_000
    prompts = tuple(
        TracePrompt(prompt_id=str(i), prompt_tokens=8000 if i == 7003 else 100, lengths=(n,))
        for i, n in enumerate(lengths)
    )
    trace = Trace(name="sorted", cap_tokens=16_384, prompts=prompts)
    spec = specify("sorted", trace, num_groups=8, group_size=1)
    assert spec.response_tokens == pytest.approx(np.mean(lengths), rel=0.01)
    assert longest_tokens(spec) == 8000 + 15_000
