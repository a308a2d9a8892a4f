"""Drafts are what a search through all texts finds, and are made and shared out as they pay. No torch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.engine.embedded.drafts import (
    COMPARED,
    INDEXED_AT_ONCE,
    LONGEST,
    SHORTEST,
    AcceptanceModel,
    Draft,
    NgramDrafter,
    NgramIndex,
)
from rollover.engine.embedded.sequence import Sequence
from tests.engine.contract import request


class Searched:
    """The index by definition: a list of all places learnt, in order, and a look at each."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self.current: dict[str, int] = {}
        self.num_learnt: list[int] = []
        self.places: list[tuple[int, int]] = []
        """Text, and position of what follows."""

    def follow(self, name: str, token_ids: list[int], num_prompt: int) -> None:
        number = self.current.get(name)
        if number is not None:
            known = self.num_learnt[number] + 1
            if self.texts[number][:known] == token_ids[:known]:
                self.texts[number] = token_ids
                return
        self.num_learnt.append(num_prompt - 1 if self.texts else 0)
        self.current[name] = len(self.texts)
        self.texts.append(token_ids)

    def catch_up(self) -> None:
        for number, text in enumerate(self.texts):
            if len(text) - 1 - self.num_learnt[number] < INDEXED_AT_ONCE:
                continue
            while self.num_learnt[number] < len(text) - 1:
                self.num_learnt[number] += 1
                self.places.append((number, self.num_learnt[number]))

    def draft(self, token_ids: list[int], most: int) -> Draft:
        found: list[int] = []
        match = 0
        while len(found) < most:
            said = token_ids + found
            for n in range(LONGEST, SHORTEST - 1, -1):
                seen = [(t, p) for t, p in self.places if p >= n <= len(said) and self.texts[t][p - n : p] == said[-n:]]
                if seen:
                    break
            else:
                break
            text, position = seen[-1]
            found += self.texts[text][position : position + most - len(found)]
            match = match or n
        return Draft(tuple(found), match)


def draft(index: NgramIndex, token_ids: list[int], most: int) -> Draft:
    if (place := index.find(token_ids)) is None:
        return Draft()
    return Draft(tuple(index.continued(place, token_ids, most)), place.match)


TOKENS = st.lists(st.integers(0, 2), max_size=12)
OPERATIONS = st.one_of(
    st.tuples(st.just("follow"), st.integers(0, 3), TOKENS),
    st.tuples(st.just("say"), st.integers(0, 3), TOKENS),
    st.tuples(st.just("resume"), st.integers(0, 3), st.integers(0, 8)),
    st.tuples(st.just("draft"), st.integers(0, 3), st.integers(1, 7)),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.lists(OPERATIONS, max_size=40))
def test_the_index_finds_what_a_search_finds(prompt: list[int], operations: list[tuple[Any, ...]]) -> None:
    index, searched = NgramIndex(), Searched()
    said: dict[int, list[int]] = {}
    for kind, who, what in operations:
        if kind == "follow":
            said[who] = [*prompt, *what]
        elif kind == "resume" and who in said:
            said[who] = said[who][: len(prompt) + what]
        elif kind == "say" and who in said:
            said[who] += what
        elif kind == "draft" and who in said:
            index.catch_up()
            searched.catch_up()
            found, expected = draft(index, said[who], what), searched.draft(said[who], what)
            assert found.token_ids == expected.token_ids
            assert found.match == expected.match or LONGEST == expected.match < found.match
        if kind in ("follow", "resume") and who in said:
            index.follow(str(who), said[who], len(prompt))
            searched.follow(str(who), said[who], len(prompt))


def test_the_longest_match_wins_then_the_latest_and_a_circle_goes_on() -> None:
    index = NgramIndex()
    text = [1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 9, 9, 3, 4, 70, 8]
    index.follow("a", text, 1)
    index.catch_up()
    assert draft(index, [1, 2, 3, 4], 1) == Draft((50,), 4)
    assert draft(index, [7, 2, 3, 4], 2) == Draft((60, 9), 3)
    assert draft(index, [7, 7, 3, 4], 9) == Draft((70, 8), 2)
    assert draft(index, [7, 7, 7, 4], 9) == Draft()
    circle = [5, 6, 5, 6, 5, 6, 5, 6, 5]
    index.follow("b", circle, 1)
    index.catch_up()
    assert draft(index, circle, 7) == Draft((6, 5, 6, 5, 6, 5, 6), 7)


def sequence(name: str, prompt: int = 0, said: tuple[int, ...] = ()) -> Sequence:
    return Sequence(
        request(name, prompt_ids=(prompt, prompt + 1, prompt + 2), max_new_tokens=999, response_ids=said), 0
    )


def test_where_a_text_ends_another_goes_on() -> None:
    index = NgramIndex()
    index.follow("a", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 1)
    index.follow("b", [0, 20, 21, 22, 23, 7, 8, 9, 30, 31, 32], 1)
    index.catch_up()
    assert draft(index, [4, 5, 6, 7, 8], 3) == Draft((9, 30, 31), 5)
    assert draft(index, [4, 5, 6, 7, 8], 9) == Draft((9, 30, 31, 32), 5)


def test_a_text_that_was_cut_short_stays_known_as_it_was() -> None:
    text = list(range(20))
    for length in range(1, 20):
        index = NgramIndex()
        index.follow("a", text, 1)
        index.catch_up()
        index.follow("a", text[:length], 1)
        place = index.find([15, 16, 17, 18])
        assert place is not None
        assert index.continued(place, [15, 16, 17, 18], 1) == [19]


def test_a_match_is_measured_as_far_as_it_goes() -> None:
    index, text = NgramIndex(), list(range(40))
    index.follow("a", text, 1)
    index.catch_up()
    for length in range(SHORTEST, 30):
        place = index.find([99, *range(30 - length, 30)])
        assert place is not None and (place.start, place.match) == (30, min(length, COMPARED))
    start = index.find(text[:6])  # of the text itself: nothing stands before it
    assert start is not None and start.match == 6


def test_rows_go_to_the_likeliest_drafts_and_in_turn_where_rates_are_equal() -> None:
    acceptance = AcceptanceModel()
    for _ in range(50):
        acceptance.observe(3, 0, rejected=True)
        acceptance.observe(16, 8, rejected=False)
    assert acceptance.rate(3) < 0.2 and acceptance.rate(16) > 0.99 and acceptance.rate(4) == 0.5
    many = [99] * 4
    assert acceptance.draft_lengths([16, 0, 16, 16], many, 10) == [2, 0, 2, 2]
    assert acceptance.draft_lengths([16, 0, 16, 16], many, 9) == [2, 0, 2, 1]
    assert acceptance.draft_lengths([16, 16, 16, 16], [1, 1, 99, 99], 14) == [1, 1, 4, 4]
    assert acceptance.draft_lengths([16, 16, 16, 16], many, 4) == [0] * 4
    assert acceptance.draft_lengths([4, 3, 16, 40], [99, 99, 8, 4], 16) == [0, 0, 8, 4]
    assert acceptance.draft_lengths([4, 3, 16, 40], [99, 99, 2, 1], 11) == [1, 0, 2, 1]


@pytest.mark.parametrize("match", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("rejected_of_ten", range(11))
def test_as_many_rows_are_spent_as_give_the_most_tokens_for_their_time(match: int, rejected_of_ten: int) -> None:
    """An iteration of R rows costs 1 + R / D. What was chosen is as good as any other number of drafts."""
    acceptance = AcceptanceModel()
    for i in range(200):
        acceptance.observe(match, int(i % 10 >= rejected_of_ten), rejected=i % 10 < rejected_of_ten)
    rate = acceptance.rate(match)
    for most_rows, num_sequences in itertools.product((2, 8, 40), (1, 3, 7)):

        def worth(lengths: list[int], d: int = most_rows, b: int = num_sequences) -> float:
            tokens = sum(1 + sum(rate**depth for depth in range(1, n + 1)) for n in lengths)
            return tokens / (1 + (b + sum(lengths)) / d)

        lengths = acceptance.draft_lengths([match] * num_sequences, [99] * num_sequences, most_rows)
        spare = max(0, most_rows - num_sequences)
        evenly = [
            [n // num_sequences + (i < n % num_sequences) for i in range(num_sequences)] for n in range(spare + 1)
        ]
        assert worth(lengths) == pytest.approx(max(map(worth, evenly)))


def test_where_drafts_are_wrong_few_are_made_and_their_return_is_noticed() -> None:
    acceptance = AcceptanceModel()

    def share_tried(num: int, *, right: bool) -> float:
        tried = 0
        for _ in range(num):
            if acceptance.draft_lengths([2, 2], [1, 1], 5) != [0, 0]:
                acceptance.observe(2, int(right), rejected=not right)
                tried += 1
        return tried / num

    share_tried(1000, right=False)
    assert 0 < share_tried(4000, right=False) < 0.1
    share_tried(1000, right=True)
    assert share_tried(1000, right=True) == 1


def test_where_drafts_gain_nothing_they_are_rarely_looked_for_and_their_return_is_noticed() -> None:
    acceptance = AcceptanceModel()

    def share_asked(num: int, num_accepted: int) -> float:
        asked = 0
        for _ in range(num):
            if acceptance.should_draft(4):
                asked += 1
                acceptance.observe(8, num_accepted, rejected=False)
        return asked / num

    share_asked(200, 0)
    assert 0.03 < share_asked(1000, 0) < 0.09
    share_asked(40, 1)
    assert share_asked(1000, 1) == 1


def test_texts_that_nobody_goes_on_with_are_forgotten_when_they_are_too_many_those_that_ended_first_first() -> None:
    drafts = NgramDrafter(most_tokens=100)
    said = (20, 21, 22, 23, 24, 20, 21)  # with its prompt ten tokens
    ends = [sequence(f"e{i}", 10 * i, said) for i in range(4)]
    goes_on = sequence("goes on", 100, said)
    for s in (*ends, goes_on):
        drafts.start(s)
    for s in ends:
        drafts.end(s)
    assert drafts.num_idle_tokens == 40
    long = sequence("long", 100, tuple(range(30, 150)))
    drafts.start(long)
    drafts.end(long)
    assert drafts.num_idle_tokens == 40  # one of its prompt goes on
    last = sequence("last", 200)
    drafts.start(last)
    last.token_ids += range(75)
    drafts.end(last)
    assert drafts.num_idle_tokens == 10 + 10 + 78
    again = [sequence(f"a{i}", 10 * i, (8, 20, 21)) for i in range(4)]
    for s in again:
        drafts.start(s)
    found = drafts.propose([*again, goes_on], [1] * 5, 14)
    assert [g.token_ids for g in found] == [(), (), (22,), (22,), (22,)]
    assert drafts.num_idle_tokens == 78
