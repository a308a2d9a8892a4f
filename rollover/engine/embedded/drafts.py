"""Guesses at the next tokens of a sequence, looked up in what it and its siblings have said. Torch-free.

Answers to one prompt repeat each other and themselves. Where the last tokens of a sequence stand in an earlier text of
its prompt, what followed there is the guess (prompt lookup: Saxena, 2023; a store of earlier texts: He et al., REST,
arXiv 2311.08252). A decode iteration checks guesses in rows of its own, so a wrong one costs a row and changes nothing;
hence nothing here need be right, and a weight update leaves it as it is.

What it keeps true: a guess is made only where guesses after matches of its length have lately been right often enough
to pay for their rows; what is proposed depends on tokens and counts alone, never on a clock; memory is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
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

    def guess(self, token_ids: AbstractSequence[int], most: int) -> Guess:
        """Up to ``most`` tokens: those after the last occurrence of the longest match, and where that text ends, what
        follows the guess so far."""
        tail, match = list(token_ids[-LONGEST:]), 0
        found: list[int] = []
        while len(found) < most:
            place = self._find((tail + found)[-LONGEST:])
            if place is None:
                break
            number, start, length = place
            found += self._texts[number].token_ids[start : start + most - len(found)]
            match = match or length
        return Guess(tuple(found), match)

    def _find(self, tail: list[int]) -> tuple[int, int, int] | None:
        """Text, position after the match, length of the match."""
        key = _packed(tail)
        for n in range(len(tail), SHORTEST - 1, -1):
            if (place := self._places[n].get(key & _MASKS[n])) is not None:
                return place >> _PLACE_BITS, place & (1 << _PLACE_BITS) - 1, n
        return None

    def _learn(self, number: int, text: _Text) -> None:
        """N-grams that something follows: all but those at the very end."""
        start, end = text.num_indexed, len(text.token_ids) - 1
        key = _packed(text.token_ids[max(0, start - LONGEST + 1) : start])
        place = (number << _PLACE_BITS) + start
        entries = [(n, mask, self._places[n]) for n, mask in _MASKS.items()]
        for length, token in enumerate(text.token_ids[start:end], start + 1):
            key = (key << _TOKEN_BITS | token) & _MASKS[LONGEST]
            place += 1
            for n, mask, places in entries:
                if n <= length:
                    places[key & mask] = place
        text.num_indexed = end


class Drafts:
    """The indices of recent prompts, and how often guesses come true.

    Args:
        most_tokens: texts of prompts not asked about lately are dropped when together all are longer than this.
    """

    def __init__(self, most_tokens: int = 2**17) -> None:
        self._most_tokens = most_tokens
        self._indices: OrderedDict[str, NgramIndex] = OrderedDict()  # least recently used first
        self._sizes: dict[str, int] = {}
        self.odds = Odds()

    def follow(self, sequence: Sequence) -> None:
        """Learn from it, from now on until memory is short, also when it is over."""
        key = sequence.request.prompt_key
        index = self._indices.setdefault(key, NgramIndex())
        self._indices.move_to_end(key)
        index.follow(sequence.request.sample_key, sequence.token_ids, sequence.num_prompt)
        self._sizes[key] = index.num_tokens
        total = sum(self._sizes.values())
        while total > self._most_tokens and len(self._indices) > 1:
            dropped, _ = self._indices.popitem(last=False)
            total -= self._sizes.pop(dropped)

    def propose(self, sequences: list[Sequence], rooms: list[int], num_rows: int) -> list[Guess]:
        """A guess for each, ``num_rows`` tokens in all and none longer than its room: a token for each in turn."""
        for key in dict.fromkeys(s.request.prompt_key for s in sequences):
            if index := self._indices.get(key):
                index.catch_up()
        found = [self._guess(s, min(room, num_rows)) for s, room in zip(sequences, rooms, strict=True)]
        lengths, depth = [0] * len(found), 0
        while num_rows and (going := [i for i, guess in enumerate(found) if len(guess.token_ids) > depth]):
            for i in going[:num_rows]:
                lengths[i] += 1
            num_rows -= min(num_rows, len(going))
            depth += 1
        return [Guess(g.token_ids[:n], g.match) if n else Guess() for g, n in zip(found, lengths, strict=True)]

    def _guess(self, sequence: Sequence, most: int) -> Guess:
        index = self._indices.get(sequence.request.prompt_key)
        if index is None or most < 1:
            return Guess()
        guess = index.guess(sequence.token_ids, most)
        return Guess(guess.token_ids[: self.odds.depth(guess.match)], guess.match) if guess.match else guess


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


def _packed(tokens: list[int]) -> int:
    key = 0
    for token in tokens:
        key = key << _TOKEN_BITS | token
    return key
