"""Kept sets as bytes: nothing is lost, and what is no kept set is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.batch import Batch, Group
from rollover.kept import MAX_KEPT
from rollover.kept_codec import check_kept, decode_kept, encode_kept, mean_kept
from rollover.routes import check_routes
from rollover.token_bytes import join_bytes, split_bytes
from rollover.types import FinishReason, Observation, Prompt, SampleId, Segment, Trajectory

ids = st.sampled_from([7, 200, 20_000, 3_000_000, 2**28 - 1]).flatmap(lambda top: st.integers(0, top))
sets = st.lists(st.sets(ids, max_size=9).map(sorted), max_size=6)


def encoded(*found: list[int]) -> tuple[bytes, ...]:
    counts = np.array([len(one) for one in found], dtype=np.int64)
    return encode_kept(counts, np.array([i for one in found for i in one], dtype=np.int64))


@settings(deadline=None, derandomize=True)
@given(sets)
def test_sets_come_back_from_bytes_and_from_one_piece(found: list[list[int]]) -> None:
    kept = encoded(*found)
    counts, all_ids = decode_kept(kept)
    assert counts.tolist() == [len(one) for one in found] and all_ids.tolist() == [i for one in found for i in one]
    assert split_bytes(join_bytes(kept), len(kept)) == kept
    assert [one == b"" for one in kept] == [not one for one in found]


def test_the_bytes_are_the_documented_ones() -> None:
    assert encoded([3, 200], [], [7]) == (b"\x03\xc5\x01", b"", b"\x07")
    assert mean_kept(encoded([3, 200], [7])) == 1.5


@pytest.mark.parametrize(
    ("kept", "tokens", "reason"),
    [
        (encoded([3, 9], [4]), (9, 4), None),
        ((), (), None),
        (encoded([3, 9]), (9, 4), "2 tokens came with 1 kept sets"),
        (encoded([3, 9], [4]), (9, 5), "token 5 is not in its kept set"),
        (encoded([3, 9], [9]), (4, 9), "token 4 is not in its kept set"),
        (encoded([3, 9], []), (9, 4), "token 4 came without its kept set"),
        ((b"\x03\x85",), (3,), "cut off"),
        ((b"\x80\x80\x80\x80\x01",), (0,), "more than 28 bits"),
        ((b"\x03\x00",), (3,), "names a token twice"),
        (encoded([*range(MAX_KEPT + 1)]), (3,), "lower rollout.top_k"),
    ],
)
def test_sets_are_checked_against_their_tokens(kept: tuple[bytes, ...], tokens: tuple[int, ...], reason: str) -> None:
    if reason is None:
        check_kept(kept, tokens, 10)
        return
    with pytest.raises(ValueError, match=reason):
        check_kept(kept, tokens)


def test_a_set_is_of_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="has token 9, but the vocabulary has 9 tokens"):
        check_kept(encoded([3, 9]), (3,), 9)


@pytest.mark.parametrize("blob", [b"\x01", b"\x02\x00\x07", b"\x01\x00\x07\x07"])
def test_bytes_of_other_sizes_are_no_sets(blob: bytes) -> None:
    with pytest.raises(ValueError, match="do not make 1 tokens"):
        split_bytes(blob, 1)


@pytest.mark.parametrize("field", ["kept", "routes"])
def test_segments_join_and_pack_bytes_like_log_probs(field: str) -> None:
    pieces = encoded([3, 9], [4])
    plain = Segment(3, (9, 4), (-0.5, 0.0), None, 3, 0.0, 1.0)
    found, without = plain._replace(**{field: pieces}), Segment(3, (8,), (-1.0,), FinishReason.STOP, 3, 1.0, 2.0)
    assert found.packed().unpacked() == found and without.packed().unpacked() == without
    prompt = Prompt(prompt_id="a", token_ids=(1,), text="", source="a")
    episode = Trajectory(
        sample_id=SampleId(0, 0), prompt=prompt, segments=(found, without), observations=(Observation((7, 2)),)
    )
    batch = Batch(step=0, groups=(Group(group_id=0, prompt=prompt, trajectories=(episode,)),))
    assert batch.packed() != batch == batch.packed().unpacked()
    assert getattr(found.joined(without), field) == (*pieces, b"")
    assert getattr(without.joined(found), field) == (b"", *pieces)
    assert getattr(without.joined(without), field) == ()


@pytest.mark.parametrize(
    ("routes", "reason"),
    [
        ((b"\x07\x01", b"\x00\x02"), None),
        ((b"\x07\x01",), "2 tokens came with 1 routes"),
        ((b"\x07\x01", b"\x00"), "unlike sizes"),
        ((b"", b""), "empty ones"),
    ],
)
def test_routes_are_checked(routes: tuple[bytes, ...], reason: str | None) -> None:
    if reason is None:
        check_routes(routes, 2)
        return
    with pytest.raises(ValueError, match=reason):
        check_routes(routes, 2)
