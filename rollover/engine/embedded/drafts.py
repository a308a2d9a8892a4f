"""Guesses at the next tokens of a sequence, looked up in what it and its siblings have said. Torch-free.

Answers to one prompt repeat each other and themselves. Where the last tokens of a sequence stand in an earlier text of
its prompt, what followed there is the guess (prompt lookup: Saxena, 2023; a store of earlier texts: He et al., REST,
arXiv 2311.08252). A decode iteration checks guesses in rows of its own, so a wrong one costs a row and changes nothing;
hence nothing here need be right, and a weight update leaves it as it is.

What it keeps true: a guess is made only where guesses after matches of its length have lately been right often enough
to pay for their rows; what is proposed depends on tokens and counts alone, never on a clock; memory is bounded.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence as AbstractSequence
from typing import NamedTuple

from rollover.engine.embedded.sequence import Sequence

SHORTEST, LONGEST = 2, 4
"""Tokens that must agree, and those that are looked at."""
_TOKEN_BITS = 32
_MASKS = {n: (1 << n * _TOKEN_BITS) - 1 for n in range(SHORTEST, LONGEST + 1)}
_PLACE_BITS = 32


class Guess(NamedTuple):
    token_ids: tuple[int, ...] = ()
    match: int = 0
    """Length of the match that it follows."""


class Place(NamedTuple):
    """Behind a match of so many tokens."""

    text: int
    start: int
    match: int


class _Text:
    """A token list that grows elsewhere, and how many of its tokens have been looked at as ends of n-grams."""

    def __init__(self, token_ids: list[int], num_indexed: int) -> None:
        self.token_ids, self.num_indexed = token_ids, num_indexed


class NgramIndex:
    """Where the n-grams of the texts of one prompt were last seen. An n-gram is an integer, token beside token."""

    def __init__(self) -> None:
        self._texts: list[_Text] = []
        self._by_name: dict[str, _Text] = {}
        self._places: dict[int, dict[int, int]] = {n: {} for n in _MASKS}

    @property
    def num_tokens(self) -> int:
        return sum(len(text.token_ids) for text in self._texts)

    def follow(self, name: str, token_ids: list[int], num_prompt: int) -> None:
        """Learn from this list, now and as it grows. A list that goes on where that of the same name ended replaces it.
        The prompt is learnt from the first list alone."""
        old = self._by_name.get(name)
        if old is not None and old.token_ids[: old.num_indexed + 1] == token_ids[: old.num_indexed + 1]:
            old.token_ids = token_ids
            return
        self._by_name[name] = text = _Text(token_ids, num_prompt - 1 if self._texts else 0)
        self._texts.append(text)

    def catch_up(self) -> None:
        """Learn what has been added to the lists since the last time."""
        for number, text in enumerate(self._texts):
            if text.num_indexed < len(text.token_ids) - 1:
                self._learn(number, text)

    def find(self, token_ids: AbstractSequence[int]) -> Place | None:
        """Where the longest match of the end of ``token_ids`` was last seen."""
        tail = token_ids[-LONGEST:]
        key = _packed(tail)
        for n in range(len(tail), SHORTEST - 1, -1):
            if (place := self._places[n].get(key & _MASKS[n])) is not None:
                return Place(place >> _PLACE_BITS, place & (1 << _PLACE_BITS) - 1, n)
        return None

    def continued(self, place: Place, token_ids: AbstractSequence[int], num_tokens: int) -> list[int]:
        """So many tokens from there; where that text ends, from where the end of ``token_ids`` and of what has been
        found was seen."""
        tail, found = list(token_ids[-LONGEST:]), self._read(place, num_tokens)
        while len(found) < num_tokens and (more := self.find((tail + found)[-LONGEST:])):
            found += self._read(more, num_tokens - len(found))
        return found

    def _read(self, place: Place, num_tokens: int) -> list[int]:
        return self._texts[place.text].token_ids[place.start : place.start + num_tokens]

    def _learn(self, number: int, text: _Text) -> None:
        """N-grams that something follows: all but those at the very end."""
        start, end = text.num_indexed, len(text.token_ids) - 1
        key = _packed(text.token_ids[max(0, start - LONGEST + 1) : start])
        place = (number << _PLACE_BITS) + start
        by_length = [(self._places[n], mask) for n, mask in _MASKS.items()]
        for token in text.token_ids[start:end]:
            key = (key << _TOKEN_BITS | token + 1) & _MASKS[LONGEST]
            place += 1
            for places, mask in by_length:
                places[key & mask] = place
        text.num_indexed = end


class Drafts:
    """The indices of prompts, and how often guesses come true. Prompts with calls open are kept whatever they are.

    Args:
        most_tokens: of all texts of the other prompts, parked or over; beyond, those whose calls ended first are
            forgotten. A token takes some 350 bytes.
    """

    def __init__(self, most_tokens: int = 2**17) -> None:
        self._most_tokens = most_tokens
        self._indices: dict[str, NgramIndex] = {}
        self._num_open: Counter[str] = Counter()
        self._idle: OrderedDict[str, int] = OrderedDict()
        """Tokens of the prompts without an open call, in the order in which the last one ended."""
        self.odds = Odds()

    @property
    def num_idle_tokens(self) -> int:
        return sum(self._idle.values())

    def start(self, sequence: Sequence) -> None:
        """Learn from it as it grows."""
        key = sequence.request.prompt_key
        self._num_open[key] += 1
        self._idle.pop(key, None)
        index = self._indices.setdefault(key, NgramIndex())
        index.follow(sequence.request.sample_key, sequence.token_ids, sequence.num_prompt)

    def end(self, sequence: Sequence) -> None:
        """It grows no more; what it has said stays of use."""
        key = sequence.request.prompt_key
        self._num_open[key] -= 1
        if self._num_open[key]:
            return
        del self._num_open[key]
        self._idle[key] = self._indices[key].num_tokens
        while self.num_idle_tokens > self._most_tokens:
            forgotten, _ = self._idle.popitem(last=False)
            del self._indices[forgotten]

    def propose(self, sequences: list[Sequence], rooms: list[int], num_rows: int) -> list[Guess]:
        """A guess for each, ``num_rows`` tokens in all and none longer than its room: a token for each in turn."""
        for key in dict.fromkeys(s.request.prompt_key for s in sequences):
            self._indices[key].catch_up()
        found = [self._guess(s, min(room, num_rows)) for s, room in zip(sequences, rooms, strict=True)]
        lengths, depth = [0] * len(found), 0
        while num_rows and (going := [i for i, guess in enumerate(found) if len(guess.token_ids) > depth]):
            for i in going[:num_rows]:
                lengths[i] += 1
            num_rows -= min(num_rows, len(going))
            depth += 1
        return [Guess(g.token_ids[:n], g.match) if n else Guess() for g, n in zip(found, lengths, strict=True)]

    def _guess(self, sequence: Sequence, most: int) -> Guess:
        index = self._indices[sequence.request.prompt_key]
        if most < 1 or (place := index.find(sequence.token_ids)) is None:
            return Guess()
        num_tokens = min(most, self.odds.depth(place.match))
        return Guess(tuple(index.continued(place, sequence.token_ids, num_tokens)), place.match)


class Odds:
    """How often a guessed token was right of late, for each length of match."""

    least = 0.25
    """A guess less likely than this costs more than it gains."""
    _step, _forgetting = 1 / 32, 1 / 2048

    def __init__(self) -> None:
        self._chances = dict.fromkeys(_MASKS, 0.7)

    def depth(self, match: int) -> int:
        """Tokens worth guessing. Where it is none, it will be tried again some time."""
        chance = self._chances[match]
        if chance < self.least:
            self._chances[match] += self._forgetting
            return 0
        depth, likely = 0, chance
        while likely >= self.least and depth < 64:
            depth, likely = depth + 1, likely * chance
        return depth

    def learn(self, guess: Guess, num_right: int) -> None:
        """Of the tokens that were guessed, those up to the first wrong one tell something."""
        for right in [True] * num_right + [False] * (num_right < len(guess.token_ids)):
            self._chances[guess.match] += self._step * (right - self._chances[guess.match])


def _packed(tokens: AbstractSequence[int]) -> int:
    """Side by side, plus one, so that none is like the nothing before a text."""
    key = 0
    for token in tokens:
        key = key << _TOKEN_BITS | token + 1
    return key
