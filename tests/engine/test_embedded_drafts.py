"""Guesses are what a search through all texts finds, and are made and shared out as they pay. No torch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.engine.embedded.drafts import LONGEST, SHORTEST, Drafts, Guess, NgramIndex, Odds
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
            while self.num_learnt[number] < len(text) - 1:
                self.num_learnt[number] += 1
                self.places.append((number, self.num_learnt[number]))

    def guess(self, token_ids: list[int], most: int) -> Guess:
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
        return Guess(tuple(found), match)


def guess(index: NgramIndex, token_ids: list[int], most: int) -> Guess:
    if (place := index.find(token_ids)) is None:
        return Guess()
    return Guess(tuple(index.continued(place, token_ids, most)), place.match)


TOKENS = st.lists(st.integers(0, 2), max_size=6)
OPERATIONS = st.one_of(
    st.tuples(st.just("follow"), st.integers(0, 3), TOKENS),
    st.tuples(st.just("say"), st.integers(0, 3), TOKENS),
    st.tuples(st.just("resume"), st.integers(0, 3), st.integers(0, 8)),
    st.tuples(st.just("guess"), st.integers(0, 3), st.integers(1, 7)),
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
        elif kind == "guess" and who in said:
            index.catch_up()
            searched.catch_up()
            assert guess(index, said[who], what) == searched.guess(said[who], what)
        if kind in ("follow", "resume") and who in said:
            index.follow(str(who), said[who], len(prompt))
            searched.follow(str(who), said[who], len(prompt))


def test_the_longest_match_wins_then_the_latest_and_a_circle_goes_on() -> None:
    index = NgramIndex()
    text = [1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 9, 9, 3, 4, 70, 8]
    index.follow("a", text, 1)
    index.catch_up()
    assert guess(index, [1, 2, 3, 4], 1) == Guess((50,), 4)
    assert guess(index, [7, 2, 3, 4], 2) == Guess((60, 9), 3)
    assert guess(index, [7, 7, 3, 4], 9) == Guess((70, 8), 2)
    assert guess(index, [7, 7, 7, 4], 9) == Guess()
    circle = [5, 6, 5, 6, 5, 6]
    index.follow("b", circle, 1)
    index.catch_up()
    assert guess(index, circle, 7) == Guess((5, 6, 5, 6, 5, 6, 5), 4)


def sequence(name: str, prompt: int = 0, said: tuple[int, ...] = ()) -> Sequence:
    return Sequence(
        request(name, prompt_ids=(prompt, prompt + 1, prompt + 2), max_new_tokens=999, response_ids=said), 0
    )


def test_spare_rows_go_round_among_those_that_have_guesses() -> None:
    cases = (
        (10, (99, 99, 99), (4, 3, 3)),
        (9, (1, 99, 99), (1, 4, 4)),
        (2, (99, 99, 99), (1, 1, 0)),
        (9, (0, 2, 3), (0, 2, 3)),
        (40, (12, 99, 5), (12, 20, 5)),
    )
    for num_rows, rooms, expected in cases:
        drafts = Drafts()
        drafts.odds.depth = lambda match: 20  # type: ignore[method-assign]
        going = [sequence(f"s{i}", said=(*range(10, 40), 10, 11)) for i in range(3)]
        for s in going:
            drafts.start(s)
        silent = sequence("other", prompt=50)
        drafts.start(silent)
        guesses = drafts.propose([silent, *going], [99, *rooms], num_rows)
        assert guesses[0] == Guess()
        assert tuple(len(g.token_ids) for g in guesses[1:]) == expected
        assert all(g.token_ids == tuple(itertools.islice(range(12, 40), len(g.token_ids))) for g in guesses)


def test_guesses_reach_as_far_as_they_are_likely_to_be_right() -> None:
    odds = Odds()
    eight = Guess(tuple(range(8)), 4)
    for _ in range(300):
        odds.learn(eight, 8)
    assert odds.depth(4) > 20
    for _ in range(1500):  # right nine times of ten: the first nine of ten looked at
        odds.learn(eight, 8)
        odds.learn(eight, 1)
    assert odds.depth(4) == pytest.approx(13, abs=3)  # 0.9 ** 13 is a quarter
    assert odds.depth(2) == Odds().depth(2)  # matches of other lengths have odds of their own


def test_where_guesses_are_wrong_few_are_made_and_their_return_is_noticed() -> None:
    odds, guess = Odds(), Guess((1, 2), 2)

    def share_tried(num: int, num_right: int) -> float:
        tried = 0
        for _ in range(num):
            if odds.depth(2):
                odds.learn(guess, num_right)
                tried += 1
        return tried / num

    share_tried(1000, 0)
    assert 0 < share_tried(4000, 0) < 0.1
    share_tried(2000, 2)
    assert share_tried(1000, 2) == 1


def test_texts_that_nobody_goes_on_with_are_forgotten_when_they_are_too_many_those_that_ended_first_first() -> None:
    drafts = Drafts(most_tokens=100)
    said = (20, 21, 22, 20, 21)  # with its prompt eight tokens
    ends = [sequence(f"e{i}", 10 * i, said) for i in range(4)]
    goes_on = sequence("goes on", 100, said)
    for s in (*ends, goes_on):
        drafts.start(s)
    for s in ends:
        drafts.end(s)
    assert drafts.num_idle_tokens == 32
    long = sequence("long", 100, tuple(range(30, 150)))
    drafts.start(long)
    drafts.end(long)
    assert drafts.num_idle_tokens == 32  # one of its prompt goes on
    last = sequence("last", 200)
    drafts.start(last)
    last.token_ids += range(75)
    drafts.end(last)
    assert drafts.num_idle_tokens == 8 + 8 + 78
    again = [sequence(f"a{i}", 10 * i, (8, 20, 21)) for i in range(4)]
    for s in again:
        drafts.start(s)
    found = drafts.propose([*again, goes_on], [1] * 5, 9)
    assert [g.token_ids for g in found] == [(), (), (22,), (22,), (22,)]
    assert drafts.num_idle_tokens == 78
