from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.trainer.packing import PackedRow, TrainingSample, first_fit_decreasing, length_buckets, pack

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def test_first_fit_decreasing_fills_bins_as_worked_by_hand() -> None:
    assert first_fit_decreasing([4, 8, 1, 4, 2, 1], 10) == ((1, 4), (0, 3, 2, 5))


@given(LENGTHS, st.integers(1, 80))
def test_every_sequence_is_in_one_bin_and_only_lone_ones_exceed_the_budget(lengths: list[int], budget: int) -> None:
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
    prompts = draw(st.lists(ids, min_size=1, max_size=4))
    pairs = draw(st.lists(st.tuples(st.sampled_from(prompts), ids), min_size=1, max_size=12))
    return [TrainingSample(prompt_ids=p, response_ids=r) for p, r in pairs]


def lines_of(row: PackedRow) -> list[list[int]]:
    """The positions of each sample, as attention sees them, without the repeated last ones."""
    lines = [line.tolist() for block in row.buckets for line in block]
    return [line[: line.index(line[-1]) + 1] for line in lines]


@settings(deadline=None)
@given(sample_lists(), st.integers(1, 90))
def test_each_response_token_is_predicted_once_from_its_own_prefix(samples: list[TrainingSample], budget: int) -> None:
    seen: dict[int, int] = {}
    for row in pack(samples, budget):
        lines = lines_of(row)
        places = torch.stack([row.predict_T, row.target_T, row.token_T, row.sample_T], 1).tolist()
        for position, target, token, place in places:
            sample = samples[row.samples_B[place]]
            line = next(line for line in lines if position in line)
            prefix = row.input_ids_N[line[: line.index(position) + 1]].tolist()
            assert [*sample.prompt_ids, *sample.response_ids][: len(prefix) + 1] == [*prefix, target]
            assert len(prefix) >= len(sample.prompt_ids)
            assert token not in seen
            seen[token] = target
    flat = [t for s in samples for t in s.response_ids]
    assert [seen[i] for i in range(len(flat))] == flat


@settings(deadline=None)
@given(sample_lists())
def test_attention_sees_each_sample_whole_and_gives_every_position_back(samples: list[TrainingSample]) -> None:
    (row,) = pack(samples, 10**6)
    flat = torch.cat([b.flatten() for b in row.buckets])
    assert flat[row.unpad_N].tolist() == list(range(len(row.input_ids_N)))
    found = []
    for line in lines_of(row):
        assert row.position_ids_N[line].tolist() == list(range(len(line)))
        found.append(tuple(row.input_ids_N[line].tolist()))
    assert sorted(found) == sorted((*s.prompt_ids, *s.response_ids[:-1]) for s in samples)


@settings(deadline=None)
@given(sample_lists(), st.integers(1, 90))
def test_rows_keep_the_budget_and_hold_a_prompt_once(samples: list[TrainingSample], budget: int) -> None:
    for row in pack(samples, budget):
        members = [samples[i] for i in row.samples_B]
        fed = sum(len(s.response_ids) - 1 for s in members)
        if len(members) > 1:
            assert len(row.input_ids_N) <= budget
        if len(row.input_ids_N) < budget // 2:
            assert len(row.input_ids_N) == fed + sum(len(p) for p in {s.prompt_ids for s in members})


def test_siblings_share_the_positions_of_their_prompt() -> None:
    samples = [TrainingSample(prompt_ids=(7, 8), response_ids=r) for r in ((1, 2), (3,), (4, 5, 6))]
    (row,) = pack(samples, 100)
    assert row.input_ids_N.tolist() == [7, 8, 1, 4, 5]
    assert row.position_ids_N.tolist() == [0, 1, 2, 2, 3]
    assert row.predict_T.tolist() == [1, 2, 1, 1, 3, 4]
    assert row.target_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.sample_T.tolist() == [0, 0, 1, 2, 2, 2]
    assert [b.tolist() for b in row.buckets] == [[[0, 1, 3, 4], [0, 1, 2, 2], [0, 1, 1, 1]]]


def test_members_alone_are_packed_and_keep_their_numbers_in_the_batch() -> None:
    samples = [TrainingSample(prompt_ids=(9,), response_ids=(i, i)) for i in range(4)]
    (row,) = pack(samples, 100, members=range(2, 4))
    assert row.samples_B == (2, 3)
    assert row.token_T.tolist() == [4, 5, 6, 7]
    assert row.target_T.tolist() == [2, 2, 3, 3]


def test_a_sample_without_prompt_or_response_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one prompt and one response token, got 0 and 2"):
        TrainingSample(prompt_ids=(), response_ids=(1, 2))
