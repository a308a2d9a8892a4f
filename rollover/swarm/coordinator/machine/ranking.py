"""The members in the order in which the dispatch rule looks at them, so that it need not look at all of them.

``choose`` in the module ``dispatch`` beside this one is the rule; here it is applied to members that are kept sorted.
Of those that serve one version and have room, the fastest comes first, and of equally fast ones the one with the least
load: the rule picks the first of some version. Only where none of these is in time does another one matter that would
finish sooner: those are looked at from the fastest on, up to the first that cannot even if it began at once.

What it keeps true: the decision is that of ``choose`` over all candidates, to the last bit; a call costs as many steps
as there are versions that members serve, and where no member is in time as many more as there are faster members that
are busy and too late.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from rollover.swarm.coordinator.machine.dispatch import Candidate, Work, finish_s, typical_speed
from rollover.swarm.coordinator.machine.members import SwarmMember

_Key = tuple[float, float, str]
"""Minus the speed, load, name."""
_UNKNOWN = 0.0
"""Stands for a speed that is not known: after all others."""


@dataclass(slots=True)
class _OfVersion:
    """The members that serve one version, fastest first: those with room, and the others."""

    free: list[_Key] = field(default_factory=list)
    full: list[_Key] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a member in the order."""

    version: int
    key: _Key
    is_free: bool
    max_running: int
    num_places: int
    prepare_s: float | None

    @property
    def without_load(self) -> tuple[int, float, int, float | None]:
        return self.version, self.key[0], self.num_places, self.prepare_s


class Ranking:
    """Applies the dispatch rule to members that are told of when they change.

    Args:
        checks: only members that passed the log-prob check count.

    Example: ``ranking.changed(member)`` whenever something about it has changed, then ``ranking.choose(work, ...)``.
    """

    def __init__(self, *, checks: bool) -> None:
        self._checks = checks
        self._members: dict[str, SwarmMember] = {}
        self._places: dict[str, _Place] = {}
        self._versions: dict[int, _OfVersion] = {}
        self._changed: dict[str, SwarmMember] = {}
        self._max_running = 0
        self._tokens_per_s: float | None = None
        """Speed of all members together; ``None`` when it has to be added up again."""
        self._speeds: list[float] = []
        """Known speeds, the slowest first."""
        self._typical: dict[tuple[int, int], tuple[tuple[float, float], float]] = {}
        """Speed that is assumed of members whose speed is unknown, by the versions asked about: the times between which
        an answer holds, and the answer."""

    def changed(self, member: SwarmMember) -> None:
        """Record that a member has changed: its load, speed, weights or whether it may get calls at all."""
        self._changed[member.name] = member

    @property
    def max_running(self) -> int:
        """Return the number of calls that all members which may get some decode at the same time."""
        self._settle()
        return self._max_running

    def has_room(self, least_version: int) -> bool:
        """Return whether a member that serves ``least_version`` or newer has room for a call."""
        self._settle()
        return any(each.free for version, each in self._versions.items() if version >= least_version)

    def drain_s(self, num_tokens: float) -> float:
        """Return the time in which all members together would decode ``num_tokens``; infinite while no speed is
        known."""
        self._settle()
        if self._tokens_per_s is None:
            members = (self._members[name] for name in sorted(self._places))
            self._tokens_per_s = math.fsum((m.call_tokens_per_s or 0.0) * m.num_places for m in members)
        return num_tokens / self._tokens_per_s if self._tokens_per_s else math.inf

    def choose(self, work: Work, head_version: int, elapsed_s: float) -> str | None:
        """Return the member that gets a call, or ``None``, as the rule says.

        ``head_version``, ``elapsed_s``: the newest version, and the time since it was published.
        """
        typical, best = self._with_room(work, head_version, elapsed_s)
        if not best:
            return None
        if in_time := [found for found, limit_s in best if found[0] <= limit_s]:
            return min(in_time)[2]
        best_s, _, name = min(found for found, _ in best)
        for candidate in self._faster(work, head_version, elapsed_s, typical, best_s):
            if finish_s(candidate, work, typical) < best_s:
                return None
        return name

    def fastest(self, work: Work, head_version: int, elapsed_s: float) -> tuple[float, str] | None:
        """Return the member with room that would finish a call first, and the time that it would take; ``None`` if no
        member has room."""
        _, best = self._with_room(work, head_version, elapsed_s)
        if not best:
            return None
        finish_s, _, name = min(found for found, _ in best)
        return finish_s, name

    def _with_room(
        self, work: Work, head_version: int, elapsed_s: float
    ) -> tuple[float, list[tuple[tuple[float, float, str], float]]]:
        """Return the speed that is assumed where it is not known; and for each version that a call accepts the expected
        finish, load and name of the member with room that the rule prefers, with the limit within which it is in time.
        """
        self._settle()
        fit = {v: each for v, each in self._versions.items() if v >= work.least_version and each.free}
        typical = math.nan
        if fit and any(_has_unknown(each) for each in self._versions.values()):
            typical = self._typical_speed(work.least_version, head_version, elapsed_s)
        return typical, [(_best(each.free, work, typical), work.limit_s(version)) for version, each in fit.items()]

    def candidates(self, head_version: int, elapsed_s: float) -> list[Candidate]:
        """Return all members that may get calls, as the rule sees them."""
        self._settle()
        return [self._members[name].candidate(head_version, elapsed_s) for name in sorted(self._places)]

    def _typical_speed(self, least_version: int, head_version: int, elapsed_s: float) -> float:
        """Return the speed that is assumed for members whose own is not known, among those that a call could go to."""
        if min(self._versions) >= least_version:
            return self._speeds[len(self._speeds) // 2] if self._speeds else 1.0
        asked = (least_version, head_version)
        if asked in self._typical:
            (since_s, until_s), typical = self._typical[asked]
            if since_s <= elapsed_s <= until_s:
                return typical
        everybody = self.candidates(head_version, elapsed_s)
        typical = typical_speed([c for c in everybody if c.version >= least_version or c.ready_s < math.inf])
        awaited = (self._members[c.name] for c in everybody if c.ready_s < math.inf)
        until_s = min((member.awaited_until_s for member in awaited), default=math.inf)
        self._typical[asked] = (elapsed_s, until_s), typical
        return typical

    def _faster(
        self, work: Work, head_version: int, elapsed_s: float, typical: float, best_s: float
    ) -> Iterator[Candidate]:
        """Yield the members without room or weights that would finish before ``best_s`` if they began at once."""
        for version, each in self._versions.items():
            is_fit = version >= work.least_version
            for keys in (each.full,) if is_fit else (each.full, each.free):
                at = 0
                while at < len(keys):
                    minus_speed, _, name = keys[at]
                    if work.remaining_tokens / (-minus_speed or typical) >= best_s:
                        at = len(keys) if minus_speed == _UNKNOWN else _first_unknown(keys)
                        continue
                    candidate = self._members[name].candidate(head_version, elapsed_s)
                    if candidate.max_running > 0 and (is_fit or candidate.ready_s < math.inf):
                        yield candidate
                    at += 1

    def _settle(self) -> None:
        """Put those that have changed where they belong."""
        if not self._changed:
            return
        changed, self._changed = self._changed, {}
        for name, member in changed.items():
            before = self._remove(name)
            after = self._insert(name, member)
            if (before and before.without_load) != (after and after.without_load):
                self._tokens_per_s = None
                self._typical.clear()

    def _insert(self, name: str, member: SwarmMember) -> _Place | None:
        version = member.serves(checked=self._checks)
        if version is None or member.ready is None or member.ready.max_running < 1:
            self._members.pop(name, None)
            return None
        self._members[name] = member
        candidate = member.candidate(version, 0.0)
        speed, load = member.call_tokens_per_s or _UNKNOWN, member.num_running / member.ready.max_running
        place = _Place(
            version=version,
            key=(-speed, load, name),
            is_free=candidate.room > 0,
            max_running=member.ready.max_running,
            num_places=member.num_places,
            prepare_s=member.prepare_s,
        )
        of_version = self._versions.setdefault(version, _OfVersion())
        insort(of_version.free if place.is_free else of_version.full, place.key)
        self._places[name] = place
        self._max_running += place.max_running
        if speed:
            insort(self._speeds, speed)
        return place

    def _remove(self, name: str) -> _Place | None:
        if (place := self._places.pop(name, None)) is None:
            return None
        of_version = self._versions[place.version]
        keys = of_version.free if place.is_free else of_version.full
        del keys[bisect_left(keys, place.key)]
        self._max_running -= place.max_running
        if place.key[0] != _UNKNOWN:
            del self._speeds[bisect_left(self._speeds, -place.key[0])]
        if not of_version.free and not of_version.full:
            del self._versions[place.version]
        return place


def _first_unknown(keys: list[_Key]) -> int:
    return bisect_left(keys, (_UNKNOWN, -1.0, ""))


def _has_unknown(each: _OfVersion) -> bool:
    return any(keys and keys[-1][0] == _UNKNOWN for keys in (each.free, each.full))


def _best(free: list[_Key], work: Work, typical: float) -> tuple[float, float, str]:
    """Return the expected finish, load and name of the member that the rule picks among those with room."""
    best, at = (math.inf, math.inf, ""), 0
    while at < len(free):
        minus_speed, load, name = free[at]
        found = (work.remaining_tokens / (-minus_speed or typical), load, name)
        is_later = found[0] > best[0]
        best = min(best, found)
        if minus_speed == _UNKNOWN:
            break  # the others of unknown speed have more load
        # Of equal speed none has less load. What is slower may be as early, by rounding; once it is not, no other is.
        at = _first_unknown(free) if is_later else bisect_left(free, (minus_speed, math.inf, ""))
    return best
