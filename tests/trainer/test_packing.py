from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.trainer.packing import TrainingSample, first_fit_decreasing, length_buckets, pack

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def test_first_fit_decreasing_fills_bins_as_worked_by_hand() -> None:
    assert first_fit_decreasing([4, 8, 1, 4, 2, 1], 10) == ((1, 4), (0, 3, 2, 5))


@given(LENGTHS, st.integers(1, 80))
def test_every_sequence_is_in_one_bin_and_only_lone_ones_exceed_the_budget(
    lengths: list[int], budget: int
) -> None:
    bins = first_fit_decreasing(lengths, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    for b in bins:
        assert sum(lengths[i] for i in b) <= budget or len(b) == 1


@given(LENGTHS)
def test_no_two_bins_could_be_one(lengths: list[int]) -> None:
    sums = [sum(lengths[i] for i in b) for b in first_fit_decreasing(lengths, 64)]
    assert all(a + b > 64 for i, a in enumerate(sums) for b in sums[:i])


@given(LENGTHS)
def test_a_bucket_holds_lengths_alike(lengths: list[int]) -> None:
    buckets = length_buckets(lengths)
    assert sorted(i for b in buckets for i in b) == list(range(len(lengths)))
    for b in buckets:
        assert min(lengths[i] for i in b) >= 0.75 * max(lengths[i] for i in b) - 8


@st.composite
def sample_lists(draw: st.DrawFn) -> list[TrainingSample]:
    ids = st.lists(st.integers(0, 99), min_size=1, max_size=25).map(tuple)
    pairs = draw(st.lists(st.tuples(ids, ids), min_size=1, max_size=12))
    return [TrainingSample(prompt_ids=p, response_ids=r) for p, r in pairs]


@settings(deadline=None)
@given(sample_lists(), st.integers(1, 90))
def test_each_response_token_is_predicted_once_from_its_own_prefix(
    samples: list[TrainingSample], budget: int
) -> None:
    seen: dict[int, int] = {}
    for row in pack(samples, budget):
        for place, (position, target, token) in enumerate(
            zip(row.predict_T, row.target_T, row.token_T, strict=True)
        ):
            sample = samples[row.samples_B[row.sample_T[place]]]
            start = position - row.position_ids_N[position]
            prefix = tuple(row.input_ids_N[start : position + 1].tolist())
            assert (*sample.prompt_ids, *sample.response_ids)[: len(prefix) + 1] == (*prefix, target)
            assert len(prefix) >= len(sample.prompt_ids)
            assert token not in seen
            seen[int(token)] = int(target)
    flat = [t for s in samples for t in s.response_ids]
    assert [seen[i] for i in range(len(flat))] == flat


@settings(deadline=None)
@given(sample_lists())
def test_attention_blocks_hold_each_sample_in_one_line_and_give_it_back(
    samples: list[TrainingSample],
) -> None:
    (row,) = pack(samples, 10**6)
    flat = np.concatenate([b.reshape(-1) for b in row.buckets])
    assert flat[row.unpad_N].tolist() == list(range(len(row.input_ids_N)))
    lines = [line for block in row.buckets for line in block]
    assert len(lines) == len(samples)
    for line in lines:
        length = len(np.unique(line))
        assert line[:length].tolist() == list(range(line[0], line[0] + length))
        assert row.position_ids_N[line[:length]].tolist() == list(range(length))


def test_members_alone_are_packed_and_keep_their_numbers_in_the_batch() -> None:
    samples = [TrainingSample(prompt_ids=(9,), response_ids=(i, i)) for i in range(4)]
    (row,) = pack(samples, 100, members=range(2, 4))
    assert row.samples_B == (2, 3)
    assert row.token_T.tolist() == [4, 5, 6, 7]
    assert row.target_T.tolist() == [2, 2, 3, 3]


def test_a_sample_without_prompt_or_response_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one prompt and one response token, got 0 and 2"):
        TrainingSample(prompt_ids=(), response_ids=(1, 2))
