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

Invariants: no call is refused by all members; equal members get equally many calls; waiting at most doubles the time
that a call takes; a call that is moved gains a factor of two, so none goes to and fro; a member that fails every call
exhausts the attempts of none. ``benchmarks/swarm_dispatch.py`` measures the gain.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rollover.swarm.coordinator.machine.placing.forecast import Deadline

NUM_PROBES = 4
"""Calls that a member gets before its speed is known."""
MARGIN_S = 5.0
"""Seconds that a move must save beside the factor of two: another member has to read the response so far."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFacts:
    """A member that may get calls, as the rule sees it."""

    version: int
    num_running: int
    max_running: int
    """Calls that it may have at a time: 0 while it is set aside, 1 on trial."""
    tokens_per_s: float | None = None
    """For each of its calls; ``None`` while nothing is measured."""
    prepare_s: float | None = None
    """Time that it took to fetch weights, the last time."""

    @property
    def places(self) -> int:
        """Return the number of calls that it gets at most."""
        return self.max_running if self.tokens_per_s else min(self.max_running, NUM_PROBES)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """A call to be placed."""

    least_version: int
    """Members that serve an older version do not get it."""
    tokens_left: float
    mean_tokens_left: float
    """Tokens that a running call has left on average."""
    horizon_s: float = 0.0
    """Time in which all members would be done with the work that is due no later; infinite if no step waits for it."""
    deadline: Deadline | None = None
    """Time at which a training step waits for the response, if that is known."""
    waited_s: float = 0.0

    def limit_s(self, version: int) -> float:
        """Return the time within which a member that serves ``version`` should finish it."""
        return self.horizon_s if self.deadline is None else max(self.horizon_s, self.deadline.under(version))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCall:
    """A call that is with a member."""

    call_id: str
    member: str
    least_version: int
    num_decoded: int
    limit: int
    tokens_per_s: float | None = None
    """The speed of the member for each of its calls, as far as it is known."""
    silent_s: float = 0.0
    """Time since its last token, or since the member has it."""


_Key = tuple[float, str]
"""Minus the speed of a member, 0 if it is not known, and its name."""


class Crowd:
    """The facts about all members, which are kept in the order of their speed: a decision looks at few of them."""

    def __init__(self) -> None:
        self.facts: dict[str, MemberFacts] = {}
        self.by_speed: tuple[list[_Key], list[_Key]] = [], []
        self.free: tuple[list[_Key], list[_Key]] = [], []
        """The members of known speed, the fastest first, and the others: all of them, and those with room."""
        self._num_free: Counter[int] = Counter()
        """Number of members with room by version."""
        self._typical: float | None = None
        self._tokens_per_s: float | None = None

    def put(self, name: str, facts: MemberFacts | None) -> None:
        """Record the facts about a member; ``None`` if it may get no calls."""
        before = self.facts.pop(name, None)
        is_as_fast = before is not None and facts is not None and before.tokens_per_s == facts.tokens_per_s
        for each, change, step in ((before, _remove, -1), (facts, insort, 1)):
            if each is None:
                continue
            key, is_unknown = (-(each.tokens_per_s or 0.0), name), not each.tokens_per_s
            if not is_as_fast:
                change(self.by_speed[is_unknown], key)
            if each.num_running < each.places:
                change(self.free[is_unknown], key)
                self._num_free[each.version] += step
                if not self._num_free[each.version]:
                    del self._num_free[each.version]
        if facts is not None:
            self.facts[name] = facts
        if not is_as_fast or before is None or facts is None or before.places != facts.places:
            self._typical = self._tokens_per_s = None

    def has_room(self, least_version: int) -> bool:
        """Return whether a member that serves ``least_version`` or newer has room for a call."""
        return any(version >= least_version for version in self._num_free)

    def drain_s(self, num_tokens: float) -> float:
        """Return the time in which all members would decode ``num_tokens``; infinite while no speed is known."""
        if self._tokens_per_s is None:
            self._tokens_per_s = math.fsum((f.tokens_per_s or 0.0) * f.places for f in self.facts.values())
        return num_tokens / self._tokens_per_s if self._tokens_per_s else math.inf

    def typical(self) -> float:
        """Return the speed that is assumed where it is not known: the median of the others."""
        if self._typical is None:
            known = self.by_speed[0]
            self._typical = -known[(len(known) - 1) // 2][0] if known else 1.0
        return self._typical


def _remove(keys: list[_Key], key: _Key) -> None:
    del keys[bisect_left(keys, key)]


def choose(crowd: Crowd, call: CallFacts, *, newest: int, age_s: float) -> str | None:
    """Return the member that gets a call, ``age_s`` after ``newest`` was published; ``None`` if it should wait."""
    if not crowd.has_room(call.least_version):
        return None
    typical, longest_s = crowd.typical(), call.limit_s(newest)
    best = late = (math.inf, math.inf, "")
    for keys in crowd.free:
        for minus_speed, name in keys:
            facts = crowd.facts[name]
            if facts.version < call.least_version:
                continue
            decodes_s = call.tokens_left / (-minus_speed or typical)
            if decodes_s > best[0] or (decodes_s > longest_s and decodes_s > late[0]):
                break
            found = decodes_s, facts.num_running / facts.places, name
            late = min(late, found)
            if decodes_s <= call.limit_s(facts.version):
                best = min(best, found)
    if best[2] or call.waited_s >= late[0]:
        return best[2] or late[2]
    for keys in crowd.by_speed:
        for minus_speed, name in keys:
            speed = -minus_speed or typical
            if call.tokens_left / speed >= late[0]:
                break
            if _ends_s(crowd.facts[name], call, speed, newest, age_s) < late[0]:
                return None
    return late[2]


def _ends_s(member: MemberFacts, call: CallFacts, speed: float, newest: int, age_s: float) -> float:
    """Return the time until a member has finished the call; weights that are long overdue are not waited for."""
    begins_s = 0.0
    if member.version < call.least_version:
        if member.version >= newest or member.prepare_s is None or age_s > 2 * member.prepare_s + 1:
            return math.inf
        begins_s = max(0.0, member.prepare_s - age_s)
    if member.num_running >= member.places:
        if not member.places:
            return math.inf
        begins_s = max(begins_s, call.mean_tokens_left / (max(1, member.num_running) * speed))
    return begins_s + call.tokens_left / speed


def moves(
    calls: Iterable[RunningCall], crowd: Crowd, expected: Callable[[int, int], float], *, max_silent_s: float
) -> Iterator[tuple[RunningCall, float, float]]:
    """Yield the calls that are to be moved, the longest first, no more than there is room for; each with its speed in
    tokens/s where it is and the seconds that it would take there.

    Args:
        expected: returns the tokens that a call has left, given how many it has and may have.
        max_silent_s: time without a token after which that limits the speed of a call.
    """
    free = [(-minus_speed, crowd.facts[name], name) for minus_speed, name in crowd.free[0]]
    if not free:
        return
    slow = []
    for call in calls:
        speed = call.tokens_per_s or math.inf
        if call.silent_s >= max_silent_s:
            speed = min(speed, 1 / call.silent_s)
        if 2 * speed < free[0][0]:  # of thousands of calls few are
            slow.append((expected(call.num_decoded, call.limit) / speed, speed, call))
    rooms = {name: facts.places - facts.num_running for _, facts, name in free}
    for left_s, speed, call in sorted(slow, key=lambda found: (-found[0], found[2].call_id)):
        if not any(rooms.values()):
            return
        better = (
            (tokens_per_s, name)
            for tokens_per_s, facts, name in free
            if name != call.member and rooms[name] and facts.version >= call.least_version
        )
        tokens_per_s, name = next(better, (0.0, ""))
        if tokens_per_s and left_s > 2 * left_s * speed / tokens_per_s + MARGIN_S:
            rooms[name] -= 1
            yield call, speed, left_s


def pause_s(num_failures: int) -> float:
    """Return the time for which a member is set aside, given the number of trials that failed before."""
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
