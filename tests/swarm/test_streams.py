"""Pieces of a response arrive in any order, any number of times; they come out once and in order."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rollover.swarm.coordinator.machine.streams import Piece, TokenStream
from rollover.types import FinishReason

START = 300


def piece(start: int, end: int, *, last: bool = False) -> Piece:
    return Piece(
        offset=start,
        token_ids=tuple(range(start, end)),
        logprobs=tuple(-float(i) for i in range(start, end)),
        version=start % 3,
        kv_version=0,
        finish_reason=FinishReason.STOP if last else None,
        num_prefilled_tokens=9,
    )


@st.composite
def deliveries(draw: st.DrawFn) -> list[Piece]:
    """All pieces of a response of 30 tokens, cut twice over in different places, shuffled and repeated."""
    pieces: list[Piece] = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted({START, START + 30, *draw(st.lists(st.integers(START + 1, START + 29), max_size=6))})
        pieces += [piece(a, b, last=b == START + 30) for a, b in itertools.pairwise(cuts)]
    pieces += draw(st.lists(st.sampled_from(pieces), max_size=5))
    return draw(st.permutations(pieces))


@given(deliveries())
def test_every_token_comes_out_once_and_in_order(arriving: list[Piece]) -> None:
    stream, out = TokenStream(START, max_early=100), []
    for each in arriving:
        out += stream.arrived(each)
    assert [t for p in out for t in p.token_ids] == list(range(START, START + 30))
    assert [x for p in out for x in p.logprobs] == [-float(i) for i in range(START, START + 30)]
    assert [p.finish_reason for p in out] == [None] * (len(out) - 1) + [FinishReason.STOP]
    assert all(p.token_ids for p in out)
    assert stream.is_over and stream.num_early == 0


@given(deliveries(), st.integers(1, 30))
def test_what_waits_is_bounded_and_what_was_dropped_can_come_again(arriving: list[Piece], max_early: int) -> None:
    stream, out = TokenStream(START, max_early=max_early), []
    for each in arriving:
        out += stream.arrived(each)
        assert stream.num_early == sum(len(p.token_ids) for p in stream._early.values()) <= max_early
    for start in range(START, START + 30, 3):  # asked for again from the position that is missing, they come in order
        out += stream.arrived(piece(start, start + 3, last=start == START + 27))
    assert [t for p in out for t in p.token_ids] == list(range(START, START + 30))
    assert stream.is_over and stream.num_early == 0


def test_a_member_that_withholds_the_first_token_makes_nothing_grow() -> None:
    """Every suffix of the response together would be 15 times as long as the response."""
    stream = TokenStream(START, max_early=30)
    for start in range(START + 29, START, -1):
        assert stream.arrived(piece(start, START + 30, last=True)) == []
        assert stream.num_early <= 30
    (first,) = stream.arrived(piece(START, START + 1))
    assert first.token_ids == (START,) and not stream.is_over


def test_a_response_that_ends_without_another_token_ends_once() -> None:
    stream = TokenStream(START, max_early=30)
    assert [p.token_ids for p in stream.arrived(piece(START, START + 2))] == [(START, START + 1)]
    end = piece(START + 2, START + 2, last=True)
    assert [(p.token_ids, p.finish_reason) for p in stream.arrived(end)] == [((), FinishReason.STOP)]
    assert stream.arrived(end) == [] and stream.arrived(piece(START, START + 2)) == []


def test_what_comes_early_waits() -> None:
    stream = TokenStream(START, max_early=30)
    assert stream.arrived(piece(START + 5, START + 9)) == []
    assert stream.num_early == 4 and not stream.is_over
    first, second = stream.arrived(piece(START, START + 7))
    assert (first.offset, second.offset) == (START, START + 7)
    assert second.num_prefilled_tokens == 0, "the head of a call is prefilled once"
