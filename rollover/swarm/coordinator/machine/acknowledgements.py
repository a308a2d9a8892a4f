"""Calls whose tokens a member holds until they are written down.

What it keeps true: a call is remembered from the moment at which a member gets it until its end is known and all of its
tokens are durable, or until it is no longer wanted; so a member is never told to forget what might still be asked of
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Holding:
    """The tokens of one call at its member.

    Example: ``Holding("laptop", "g4.1.", acked=256, end=300)``: 44 tokens of a call that has ended are not durable yet.
    """

    member: str
    sample_key: str
    acked: int
    """Position after the last token that is durable."""
    end: int | None = None
    """Position of its end, once that is known here."""


@dataclass(frozen=True, slots=True)
class Due:
    """An acknowledgement that a member is to get.

    Example: ``Due("laptop", "8f3a.g4.1#7.", 300, True)``: the call has ended at 300, and all of it is durable.
    """

    member: str
    call_id: str
    offset: int
    is_over: bool


class Acknowledgements:
    """Follows calls from their member to the journal.

    Example: after ``given("c", "g4.1.", "laptop", 0)`` and ``ended("c", 300)``, ``durable("g4.1.", 300)`` yields the
    last acknowledgement of ``c``.
    """

    def __init__(self) -> None:
        self._holdings: dict[str, Holding] = {}
        self._of_sample: dict[str, list[str]] = {}
        """Calls of each sample: more than one where an earlier one has ended and is not written down."""

    def __len__(self) -> int:
        return len(self._holdings)

    def get(self, call_id: str) -> Holding | None:
        return self._holdings.get(call_id)

    def given(self, call_id: str, sample_key: str, member: str, start: int) -> None:
        """Record that a member has a call from now on, of a response that is durable up to ``start``."""
        self._holdings[call_id] = Holding(member, sample_key, start)
        self._of_sample.setdefault(sample_key, []).append(call_id)

    def ended(self, call_id: str, position: int) -> None:
        """Record that a call has ended here; its last tokens have yet to be written down."""
        if (holding := self._holdings.get(call_id)) is not None:
            holding.end = position

    def lapsed(self, call_ids: Iterable[str]) -> None:
        """Record that the member of these calls, which have ended here, is gone. Where all received tokens of a call
        are durable, tokens that the member may still hold of it count as not asked for yet."""
        for call_id in call_ids:
            if (holding := self._holdings.get(call_id)) is not None and holding.end == holding.acked:
                self.dropped(call_id)

    def dropped(self, call_id: str) -> None:
        """Record that the member was told to forget a call."""
        if (holding := self._holdings.pop(call_id, None)) is not None:
            calls = self._of_sample[holding.sample_key]
            calls.remove(call_id)
            if not calls:
                del self._of_sample[holding.sample_key]

    def durable(self, sample_key: str, num_tokens: int) -> Iterator[Due]:
        """Yield what is due now that the first ``num_tokens`` of a response are durable."""
        for call_id in list(self._of_sample.get(sample_key, ())):
            holding = self._holdings[call_id]
            is_over = holding.end is not None and num_tokens >= holding.end
            offset = num_tokens if holding.end is None else min(num_tokens, holding.end)
            if offset > holding.acked or is_over:
                holding.acked = max(holding.acked, offset)
                yield Due(holding.member, call_id, holding.acked, is_over)
            if is_over:
                self.dropped(call_id)
