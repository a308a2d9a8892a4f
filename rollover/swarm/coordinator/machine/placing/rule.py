"""The placing rule: which member gets a call, which calls are moved, and for how long a failing member is set aside.

*Placing.* Let a call have ``r`` tokens left, as far as past lengths tell, and a member decode ``v`` tokens per second
of each of its ``n`` calls. With room, it finishes the call after ``r / v``; without room, after ``w + r / v``, where
``w`` is the time until one of its calls ends: with ``m`` tokens left for each on average, ``m / (n v)``. A member that
is fetching the weights that a call asks for is counted with the time that this will take.

A member is *in time* if it finishes within the longer of two times: until a training step waits for the response, and
until all members together would be done with the work that is due no later. The call goes to the fastest member with
room among those in time. If there is none, the call waits for a member that is busy or fetching weights, provided that
this member would finish it sooner than any with room. Otherwise it goes to the fastest member with room, and so it does
after waiting for as long as that member takes: the expectation can be wrong, since members report their own speed.

*Moving.* At the end of a batch all wait for the calls of slow members. If a member has room although no call waits for
it, and decodes ``u`` tokens per second of each call, then a call for which ``r / v`` exceeds ``2 r / u`` by more than
``MARGIN_S`` ends at its member and continues there, after the tokens that have arrived. The speed ``v`` is at most what
the call has shown: one token over the time without any.

*Setting aside.* A member at which a call fails gets none for a second, then one at a time until it decodes a token;
each further failure doubles the pause, up to a minute.

Invariants: no call is refused by all members; slow members work as long as that holds up no other call; equal members
get equally many calls; waiting at most doubles the time that a call takes; a call that is moved gains a factor of two,
so none goes to and fro; a member that fails every call exhausts the attempts of none.
``benchmarks/swarm_dispatch.py`` measures the gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollover.swarm.coordinator.machine.placing.forecast import Deadline, Floats

NUM_PROBES = 4
"""Calls that a member gets before its speed is known."""
MARGIN_S = 5.0
"""Seconds that a move must save beside the factor of two: another member has to read the response so far."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_ABSENT = (-1.0, 0.0, 0.0, 0.0, math.inf)
"""The column of a member that may get no calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFacts:
    """A member that may get calls, as the rule sees it.

    Example: ``MemberFacts(version=7, num_running=3, max_running=16, tokens_per_s=21.0)``
    """

    version: int
    num_running: int
    max_running: int
    """Calls that it may have at a time: 0 while it is set aside, 1 on trial."""
    tokens_per_s: float | None = None
    """For each of its calls; ``None`` while nothing is measured."""
    prepare_s: float | None = None
    """Time that it took to fetch weights, the last time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """A call to be placed.

    Example: ``CallFacts(least_version=6, tokens_left=412.0, mean_tokens_left=300.0)``
    """

    least_version: int
    """Members that serve an older version do not get it."""
    tokens_left: float
    """Tokens that it is expected to decode."""
    mean_tokens_left: float
    """Tokens that a running call has left on average."""
    horizon_s: float = 0.0
    """Time in which all members together would be done with the work that is due no later; infinite if no step waits
    for the response."""
    deadline: Deadline | None = None
    """Time at which a training step waits for the response, if that is known."""
    waited_s: float = 0.0
    """Time for which it has been kept waiting."""

    def limit_s(self, versions: Floats) -> Floats | float:
        """Return the time within which members that serve ``versions`` should finish it."""
        if self.deadline is None:
            return self.horizon_s
        return np.maximum(self.horizon_s, self.deadline.under(versions))


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """The newest publication of weights.

    Example: ``News(version=8, age_s=2.5)``
    """

    version: int
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCall:
    """A call that is with a member.

    Example: ``RunningCall(call_id="a#1.", member="phone", least_version=6, num_decoded=31, limit=512)``
    """

    call_id: str
    member: str
    least_version: int
    num_decoded: int
    limit: int
    tokens_per_s: float | None = None
    """The speed of the member for each of its calls, as far as it is known."""
    silent_s: float = 0.0
    """Time since its last token, or since the member has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A call that is better off elsewhere.

    Example: ``Move(call_id="a#1.", member="phone", tokens_per_s=0.5, left_s=400.0)``
    """

    call_id: str
    member: str
    tokens_per_s: float
    """Tokens that its member decodes of it per second, at most."""
    left_s: float


class Crowd:
    """The facts about all members in columns, so that a call is compared with a thousand of them at once.

    Example: ``crowd.put("laptop", facts)`` whenever one of them has changed, and ``crowd.put("laptop", None)`` if it
    may get no more calls.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._index: dict[str, int] = {}
        self._table: Floats = np.zeros((len(_ABSENT), 0))
        self._newest_with_room: float | None = None
        self._typical: float | None = None
        self._tokens_per_s: float | None = None

    def put(self, name: str, facts: MemberFacts | None) -> None:
        """Record the facts about a member; ``None`` if it may get no calls."""
        if (place := self._index.get(name)) is None:
            if facts is None:
                return
            place = self._index[name] = len(self.names)
            self.names.append(name)
            self._table = np.column_stack([self._table, _ABSENT])
        column = _ABSENT
        if facts is not None:
            speed = facts.tokens_per_s or 0.0
            places = facts.max_running if speed else min(facts.max_running, NUM_PROBES)
            prepare_s = math.inf if facts.prepare_s is None else facts.prepare_s
            column = float(facts.version), float(facts.num_running), float(places), speed, prepare_s
        _, _, places_before, speed_before, _ = self._table[:, place].tolist()
        self._table[:, place] = column
        self._newest_with_room = None
        if (column[2], column[3]) != (places_before, speed_before):
            self._typical = self._tokens_per_s = None

    def has_room(self, least_version: int) -> bool:
        """Return whether a member that serves ``least_version`` or newer has room for a call."""
        if self._newest_with_room is None:
            versions, running, places, _, _ = self._table
            self._newest_with_room = float(np.max(versions[running < places], initial=-1.0))
        return self._newest_with_room >= least_version

    def drain_s(self, num_tokens: float) -> float:
        """Return the time in which all members together would decode ``num_tokens``; infinite while no speed is
        known."""
        if self._tokens_per_s is None:
            _, _, places, speeds, _ = self._table
            self._tokens_per_s = float(places @ speeds)
        return num_tokens / self._tokens_per_s if self._tokens_per_s else math.inf

    def columns(self) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        """Return versions, numbers of calls, places, speeds, and times to fetch weights. A speed that is not known is
        taken to be the median of the others."""
        versions, running, places, speeds, prepare_s = self._table
        if self._typical is None:
            known = np.sort(speeds[speeds > 0])
            self._typical = float(known[len(known) // 2]) if len(known) else 1.0
        return versions, running, places, np.where(speeds > 0, speeds, self._typical), prepare_s

    def with_room(self) -> list[tuple[float, int, str, int]]:
        """Return speed, version, name and room of the members that have room and a known speed, the fastest first."""
        versions, running, places, speeds, _ = self._table
        (found,) = np.nonzero((running < places) & (speeds > 0))
        rows = [(float(speeds[i]), int(versions[i]), self.names[i], int(places[i] - running[i])) for i in found]
        return sorted(rows, key=lambda row: (-row[0], row[2]))


def choose(crowd: Crowd, call: CallFacts, news: News) -> str | None:
    """Return the member that gets a call; ``None`` if the call should wait, or no member may have it."""
    if not crowd.has_room(call.least_version):
        return None
    versions, running, places, speeds, prepare_s = crowd.columns()
    fits = versions >= call.least_version
    free = fits & (running < places)
    decodes_s = call.tokens_left / speeds
    in_time = free & (decodes_s <= call.limit_s(versions))
    place = _first(in_time if in_time.any() else free, decodes_s, running / np.maximum(places, 1.0))
    if in_time[place] or call.waited_s >= decodes_s[place]:
        return crowd.names[place]
    # A member is waited for only for about as long as it took to fetch the last weights.
    is_fetching = (versions < news.version) & (news.age_s <= 2 * prepare_s + 1) & np.isfinite(prepare_s)
    fetched_s = np.where(fits, 0.0, np.where(is_fetching, np.maximum(0.0, prepare_s - news.age_s), math.inf))
    turn_s = np.where(running < places, 0.0, call.mean_tokens_left / (np.maximum(running, 1.0) * speeds))
    ends_s = np.where(places > 0, np.maximum(fetched_s, turn_s) + decodes_s, math.inf)
    return crowd.names[place] if decodes_s[place] <= ends_s.min() else None


def _first(among: NDArray[np.bool_], ends_s: Floats, loads: Floats) -> int:
    """Return the place of the member that finishes first; of several, the place of the one with the least load."""
    ends_s = np.where(among, ends_s, math.inf)
    return int(np.where(ends_s == ends_s.min(), loads, math.inf).argmin())


def moves(
    calls: Iterable[RunningCall], crowd: Crowd, expected: Callable[[int, int], float], *, max_silent_s: float
) -> Iterator[Move]:
    """Yield the calls that are to be moved, the longest first, no more than there is room for.

    Args:
        expected: returns the tokens that a call has left, given those that it has and may have.
        max_silent_s: time without a token after which that limits the speed of a call.
    """
    free = crowd.with_room()
    if not free:
        return
    slow = []
    for call in calls:
        speed = call.tokens_per_s or math.inf
        if call.silent_s >= max_silent_s:
            speed = min(speed, 1 / call.silent_s)
        if 2 * speed < free[0][0]:  # of thousands of calls few are
            slow.append((expected(call.num_decoded, call.limit) / speed, call.call_id, speed, call))
    rooms = {name: room for _, _, name, room in free}
    for left_s, call_id, speed, call in sorted(slow, key=lambda found: (-found[0], found[1])):
        if not any(rooms.values()):
            return
        better = (
            (tokens_per_s, name)
            for tokens_per_s, version, name, _ in free
            if name != call.member and rooms[name] and version >= call.least_version
        )
        tokens_per_s, name = next(better, (0.0, ""))
        if tokens_per_s and left_s > 2 * left_s * speed / tokens_per_s + MARGIN_S:
            rooms[name] -= 1
            yield Move(call_id=call_id, member=call.member, tokens_per_s=speed, left_s=left_s)


def pause_s(num_failures: int) -> float:
    """Return the time for which a member is set aside, given how many calls failed at it before, one trial after the
    other."""
    return min(_FIRST_PAUSE_S * 2.0 ** min(num_failures, 16), _LONGEST_PAUSE_S)


def counts_as_attempt(*, has_failed_before: bool, num_failures: int, fails_alone: bool, is_alone: bool) -> bool:
    """Return whether the failure of a call is a failed attempt of its sample, rather than its member's failure.

    Args:
        has_failed_before: a call of the sample has failed already, and no token of it has come since.
        num_failures: failures at the member since its last token, without this one.
        fails_alone: all of these were of this sample.
        is_alone: no other member has ever taken part. Otherwise the others are waited for.
    """
    return has_failed_before and (num_failures == 0 or (fails_alone and is_alone))
