"""Draft tokens for speculative decoding, looked up by n-gram in the earlier responses to the same prompt. Torch-free.

Responses to one prompt repeat each other and themselves. Where the last tokens of a sequence stand in an earlier text
of its prompt, the tokens that followed there are its draft (prompt lookup: Saxena, 2023; a store of earlier texts: He
et al., REST, arXiv 2311.08252). A decode iteration verifies draft tokens in rows of its own, so a rejected one costs a
row and changes nothing; hence no draft need be right, and a weight update leaves the texts as they are.

Invariants: a row is spent only on a draft token that, by the recent acceptance rate, earns more tokens for its time
than the iteration does without it; what is proposed depends on tokens and counts alone, never on a clock; memory is
bounded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Sequence as AbstractSequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from rollover.engine.embedded.sequence import Sequence

SHORTEST, LONGEST = 2, 4
"""Lengths of the shortest and the longest n-grams that are looked up."""
COMPARED = 16
"""Maximum number of tokens before a draft that are compared with the end of the sequence."""
INDEXED_AT_ONCE = 8
"""InputBatch, at least."""
_TOKEN_BITS = 32
_MASKS = {n: (1 << n * _TOKEN_BITS) - 1 for n in range(SHORTEST, LONGEST + 1)}
_PLACE_BITS = 32


class Draft(NamedTuple):
    """Draft tokens for one sequence, and how well the place that they were taken from matches its end.

    Example:
        A response ends with ``7 8 9``, and an earlier one has ``7 8 9 4 5``: ``Draft(token_ids=(4, 5), match=3)``.
    """

    token_ids: tuple[int, ...] = ()
    match: int = 0


class Place(NamedTuple):
    """The text and the position where a draft begins, and how many tokens before it match.

    Example:
        ``Place(text=2, start=40, match=4)``: tokens 36 to 39 of the third text are the last four of the sequence.
    """

    text: int
    start: int
    match: int


class _Text:
    """A token list that grows elsewhere, and how many of its tokens have been looked at as ends of n-grams."""

    def __init__(self, token_ids: list[int], num_indexed: int) -> None:
        self.token_ids, self.num_indexed = token_ids, num_indexed


class NgramIndex:
    """Finds where the n-grams of the texts of one prompt were last seen. An n-gram is one integer, token by token."""

    def __init__(self) -> None:
        self._texts: list[_Text] = []
        self._by_name: dict[str, _Text] = {}
        self._places: dict[int, dict[int, int]] = {n: {} for n in _MASKS}

    @property
    def num_tokens(self) -> int:
        return sum(len(text.token_ids) for text in self._texts)

    def follow(self, name: str, token_ids: list[int], num_prompt: int) -> None:
        """Index this list, now and as it grows. A list that continues where the one of the same name ended replaces it.
        The prompt is indexed from the first list alone."""
        old = self._by_name.get(name)
        if old is not None and old.token_ids[: old.num_indexed + 1] == token_ids[: old.num_indexed + 1]:
            old.token_ids = token_ids
            return
        self._by_name[name] = text = _Text(token_ids, num_prompt - 1 if self._texts else 0)
        self._texts.append(text)

    def catch_up(self) -> None:
        """Index what has been added to the lists; one token at a time would cost three times as much."""
        for number, text in enumerate(self._texts):
            if len(text.token_ids) - 1 - text.num_indexed >= INDEXED_AT_ONCE:
                self._index(number, text)

    def find(self, token_ids: AbstractSequence[int]) -> Place | None:
        """Find where the longest n-gram at the end of ``token_ids`` was last seen."""
        tail = token_ids[-LONGEST:]
        key = _packed(tail)
        for n in range(len(tail), SHORTEST - 1, -1):
            if (place := self._places[n].get(key & _MASKS[n])) is not None:
                number, start = place >> _PLACE_BITS, place & (1 << _PLACE_BITS) - 1
                return Place(number, start, self._agreement(number, start, token_ids) if n == LONGEST else n)
        return None

    def _agreement(self, number: int, start: int, token_ids: AbstractSequence[int]) -> int:
        """Count the tokens before ``start`` that agree with the end of ``token_ids``, up to ``COMPARED``."""
        text = self._texts[number].token_ids
        most, length = min(start, len(token_ids), COMPARED), LONGEST
        while length < most and text[start - 1 - length] == token_ids[-1 - length]:
            length += 1
        return length

    def continued(self, place: Place, token_ids: AbstractSequence[int], num_tokens: int) -> list[int]:
        """Read at most ``num_tokens`` tokens from there; where that text ends, look up the end of ``token_ids`` and of
        the tokens read so far."""
        tail, found = list(token_ids[-LONGEST:]), self._read(place, num_tokens)
        while len(found) < num_tokens and (more := self.find((tail + found)[-LONGEST:])):
            found += self._read(more, num_tokens - len(found))
        return found

    def _read(self, place: Place, num_tokens: int) -> list[int]:
        return self._texts[place.text].token_ids[place.start : place.start + num_tokens]

    def _index(self, number: int, text: _Text) -> None:
        """Index the n-grams that something follows: all but those at the very end."""
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


class NgramDrafter:
    """Proposes draft tokens from an n-gram index of each prompt. The indices of prompts with open calls are kept.

    Args:
        most_tokens: the number of tokens kept of all prompts without an open call; beyond it, those whose calls ended
            first are forgotten. A token takes some 350 bytes.
    """

    def __init__(self, most_tokens: int = 2**17) -> None:
        self._most_tokens = most_tokens
        self._indices: dict[str, NgramIndex] = {}
        self._num_open: Counter[str] = Counter()
        self._idle: OrderedDict[str, int] = OrderedDict()
        """The number of tokens of each prompt without an open call, in the order in which the last call ended."""
        self.acceptance = AcceptanceModel()

    @property
    def num_idle_tokens(self) -> int:
        return sum(self._idle.values())

    def start(self, sequence: Sequence) -> None:
        """Index the sequence as it grows."""
        key = sequence.request.prompt_key
        self._num_open[key] += 1
        self._idle.pop(key, None)
        index = self._indices.setdefault(key, NgramIndex())
        index.follow(sequence.request.sample_key, sequence.token_ids, sequence.num_prompt)

    def end(self, sequence: Sequence) -> None:
        """End the sequence, which grows no more; its text is kept for others."""
        key = sequence.request.prompt_key
        self._num_open[key] -= 1
        if self._num_open[key]:
            return
        del self._num_open[key]
        self._idle[key] = self._indices[key].num_tokens
        while self.num_idle_tokens > self._most_tokens:
            forgotten, _ = self._idle.popitem(last=False)
            del self._indices[forgotten]

    def propose(self, sequences: list[Sequence], rooms: list[int], most_rows: int) -> list[Draft]:
        """Propose a draft for each sequence, none longer than its room: the likeliest tokens first, those of equal
        rates in turn, as long as they pay and the rows, one of each sequence and one of each draft token, are no more
        than ``most_rows``."""
        if not self.acceptance.should_draft(len(sequences)):
            return [Draft()] * len(sequences)
        for key in dict.fromkeys(s.request.prompt_key for s in sequences):
            self._indices[key].catch_up()
        places = [self._indices[s.request.prompt_key].find(s.token_ids) for s in sequences]
        matches = [place.match if place and room > 0 else 0 for place, room in zip(places, rooms, strict=True)]
        lengths = self.acceptance.draft_lengths(matches, rooms, most_rows)
        return [
            self._draft(sequence, place, length) if place and length else Draft()
            for sequence, place, length in zip(sequences, places, lengths, strict=True)
        ]

    def _draft(self, sequence: Sequence, place: Place, length: int) -> Draft:
        index = self._indices[sequence.request.prompt_key]
        return Draft(tuple(index.continued(place, sequence.token_ids, length)), place.match)


class AcceptanceModel:
    """Estimates the acceptance rate of draft tokens by the length of the match, and how many of them pay.

    An iteration of R rows is taken to cost ``1 + R / D``, where D is the number of rows that drafts may fill up. If it
    is expected to yield N tokens, one row more, accepted at rate p, raises the tokens per cost where ``p (D + R) > N``.
    Looking drafts up costs something too: where they gain hardly any tokens, that is done now and then only.

    Example:
        With D = 16, eight sequences and so far no draft token, R = N = 8: a draft token pays where p > 8 / 24.
    """

    _kinds = (2, 3, 4, 8, COMPARED)
    """The shortest match of each kind that has a rate of its own."""
    _first, _step, _forgetting = 0.5, 1 / 32, 1 / 2048
    _least_gain, _rests = 1 / 64, 16

    def __init__(self) -> None:
        self._rates = [self._first] * len(self._kinds)
        self._gain = 8 * self._least_gain
        """Recent number of accepted tokens per sequence and look-up."""
        self._num_drafting = self._num_accepted = 0

    def rate(self, match: int) -> float:
        return self._rates[self._kind(match)]

    def should_draft(self, num_sequences: int) -> bool:
        """Decide whether to look for drafts for ``num_sequences`` sequences."""
        if self._num_drafting:
            self._gain += self._step * (self._num_accepted / self._num_drafting - self._gain)
        self._num_drafting = self._num_accepted = 0
        if self._gain < self._least_gain:
            self._gain += self._least_gain * self._step / self._rests
            return False
        self._num_drafting = num_sequences
        return True

    def draft_lengths(self, matches: AbstractSequence[int], rooms: AbstractSequence[int], most_rows: int) -> list[int]:
        """Decide how many tokens to draft for each sequence, given its match; a match of 0 is none."""
        lengths = [0] * len(matches)
        num_rows, expected = len(matches), float(len(matches))
        likely = [(-self.rate(match), i) for i, match in enumerate(matches) if match]
        heapify(likely)
        while likely and num_rows < most_rows:
            negative, i = likely[0]
            if -negative * (most_rows + num_rows) <= expected:
                for kind in {self._kind(matches[i]) for _, i in likely if not lengths[i]}:  # try again some time
                    self._rates[kind] = min(self._first, self._rates[kind] + self._forgetting)
                break
            lengths[i] += 1
            num_rows, expected = num_rows + 1, expected - negative
            if lengths[i] < rooms[i]:
                heapreplace(likely, (negative * self.rate(matches[i]), i))
            else:
                heappop(likely)
        return lengths

    def observe(self, match: int, num_accepted: int, *, rejected: bool) -> None:
        """Take note that ``num_accepted`` tokens of a draft were accepted, and the next one was rejected or not
        verified."""
        self._num_accepted += num_accepted
        kind = self._kind(match)
        for accepted in [True] * num_accepted + [False] * rejected:
            self._rates[kind] += self._step * (accepted - self._rates[kind])

    def _kind(self, match: int) -> int:
        return bisect_right(self._kinds, match) - 1


def _packed(tokens: AbstractSequence[int]) -> int:
    """Pack tokens side by side into an integer, plus one each, so that none is like the nothing before a text."""
    key = 0
    for token in tokens:
        key = key << _TOKEN_BITS | token + 1
    return key
