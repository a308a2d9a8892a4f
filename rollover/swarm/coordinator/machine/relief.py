"""Relief of slow members: faster ones that have nothing to do take over what is left of their calls.

While there is work for all, a slow member holds up no other. At the end of a batch it does, and where each group is due
at some step it does so again and again: all wait for the one sample that it has. Members with room show that this is
so, since no waiting call was given to them. Let a call have ``r`` tokens left, as far as past lengths tell, its member
decode ``v`` tokens per second of it, and a member with room ``w`` per second of each of its calls: where ``r / v``
exceeds ``2 r / w`` by more than ``MARGIN_S``, the call ends at the one and continues at the other, after the tokens
that have arrived. ``v`` is at most what the call has shown: one token more than have come, over the time without
another.

What it keeps true: a call that is moved is worth it twice over, so none goes to and fro; a member that sends heartbeats
and no tokens holds up no other for longer than ``patience_s``, where another has room.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from rollover.swarm.coordinator.machine.dispatch import Candidate
from rollover.swarm.coordinator.machine.remaining import RemainingTokens
from rollover.swarm.coordinator.machine.swarm_call import SwarmCall

MARGIN_S = 5.0
"""Seconds that a move must save beside the factor of two: another member has to read the response so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldUp:
    """A call that is better off elsewhere.

    Example: ``HeldUp(call_id="a#1.", member="phone", tokens_per_s=0.5, left_s=400.0)``
    """

    call_id: str
    member: str
    tokens_per_s: float
    """Tokens a second that the member decodes of it, at most."""
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CallUnderWay:
    """A call that is with a member, which decodes ``tokens_per_s`` of each of its calls as far as is known.

    Example: ``CallUnderWay(call_id="a#1.", call=call, member="phone", tokens_per_s=None)``
    """

    call_id: str
    call: SwarmCall
    member: str
    tokens_per_s: float | None


class Relief:
    """Says which calls are to be moved, having looked at them from time to time.

    Args:
        patience_s: seconds for which a call may stay without a token before that says anything.

    Example: ``relief.held_up(calls, candidates, remaining, 30.0)`` every two seconds; nearly always nothing.
    """

    def __init__(self, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._seen: dict[str, tuple[float, int]] = {}
        """Time at which the last new token of a call was seen, and number of tokens then."""

    def rest(self) -> None:
        """Take note that there is work for all: nothing is held up."""
        self._seen.clear()

    def held_up(
        self, calls: Iterable[CallUnderWay], candidates: Iterable[Candidate], remaining: RemainingTokens, now_s: float
    ) -> Iterator[HeldUp]:
        """Yield the calls that are to be moved, the one that would take longest first, no more than there is room for.

        ``candidates``: the members that may get calls.
        """
        free = sorted((c for c in candidates if c.room > 0 and c.call_tokens_per_s), key=_slowness)
        if not free:
            return
        fastest, expected = free[0].call_tokens_per_s or 0.0, cache(remaining.expected)
        seen: dict[str, tuple[float, int]] = {}
        worst: list[tuple[float, str, HeldUp, SwarmCall]] = []
        for under_way in calls:
            call_id, call = under_way.call_id, under_way.call
            at_s, num_tokens = self._seen.get(call_id, (now_s, call.position))
            seen[call_id] = (now_s if call.position > num_tokens else at_s, call.position)
            if call.is_directed or call.is_aborted:
                continue
            speed = self._speed(under_way.tokens_per_s, now_s - seen[call_id][0])
            if speed is None or 2 * speed >= fastest:
                continue  # no member is worth a move: of thousands of calls most end here
            left_s = expected(call.position, call.limit) / speed
            if left_s > 2 * left_s * speed / fastest + MARGIN_S:
                found = HeldUp(call_id=call_id, member=under_way.member, tokens_per_s=speed, left_s=left_s)
                worst.append((-left_s, call_id, found, call))
        self._seen = seen
        heapq.heapify(worst)
        rooms = {candidate.name: candidate.room for candidate in free}
        while worst and any(rooms.values()):
            _, _, found, call = heapq.heappop(worst)
            if (name := _better(found, call, free, rooms)) is not None:
                rooms[name] -= 1
                yield found

    def _speed(self, known: float | None, silent_s: float) -> float | None:
        """Return what a member decodes of a call per second, at most; ``None`` while that says nothing."""
        if silent_s < self._patience_s:
            return known
        return 1 / silent_s if known is None else min(known, 1 / silent_s)


def _better(found: HeldUp, call: SwarmCall, free: list[Candidate], rooms: dict[str, int]) -> str | None:
    """Return the fastest other member with room whose weights the call accepts, where it is worth a move."""
    for candidate in free:
        if candidate.name == found.member or not rooms[candidate.name] or candidate.version < call.least_version:
            continue
        assert candidate.call_tokens_per_s, "its speed is known"
        there_s = found.left_s * found.tokens_per_s / candidate.call_tokens_per_s
        return candidate.name if found.left_s > 2 * there_s + MARGIN_S else None
    return None


def _slowness(candidate: Candidate) -> tuple[float, str]:
    return -(candidate.call_tokens_per_s or 0.0), candidate.name
