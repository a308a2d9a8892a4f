"""Giving calls to members: by promise, by what they hold already, or by the dispatch rule.

What it keeps true: a promise is kept as long as its member can keep it; a call goes to a member whose weights it
accepts, and in sequential pull only to one that has the newest; a member that will not finish before a training step
waits for the response does not get it while another would finish sooner, unless that was expected for too long; tokens
that a connected member offers are not decoded again; an offer is believed only of a sample that its member was given.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping

from msgspec import structs

from rollover.swarm.coordinator.machine.calls import SwarmCalls
from rollover.swarm.coordinator.machine.deadlines import Deadline, Pace
from rollover.swarm.coordinator.machine.dispatch import Candidate, Work
from rollover.swarm.coordinator.machine.effects import Effect, Send
from rollover.swarm.coordinator.machine.members import SwarmCounters, SwarmMember
from rollover.swarm.coordinator.machine.patience import CallPatience
from rollover.swarm.coordinator.machine.ranking import Ranking
from rollover.swarm.coordinator.machine.remaining import RemainingTokens
from rollover.swarm.coordinator.machine.sample_keys import SampleKeys
from rollover.swarm.coordinator.machine.swarm_call import SwarmCall
from rollover.swarm.wire.messages import HeldCall, Release


class Placing:
    """Decides who gets which call.

    Args:
        members: the swarm's, by name.
        keys: by which members know samples.
        exact: calls go to members with the newest version only.
        checks: members get calls only under a version that passed the log-prob check.

    Example: ``placing.promise("g4.1.", 3, 512, num_waiting=7, max_staleness=4, until_s=60.0)`` returns 4: there is a
    place at a member that serves version 4.
    """

    def __init__(
        self,
        members: Mapping[str, SwarmMember],
        keys: SampleKeys,
        calls: SwarmCalls,
        ranking: Ranking,
        counters: SwarmCounters,
        *,
        exact: bool,
        checks: bool,
    ) -> None:
        self._members, self._keys, self._calls, self._ranking, self._counters = members, keys, calls, ranking, counters
        self._exact, self._checks = exact, checks
        self.remaining = RemainingTokens()
        self._pace, self._patience = Pace(), CallPatience()
        self.newest = 0
        self.now_s = 0.0
        """Time at which something was last heard."""
        self._to_come: tuple[int, Deadline | None] = 0, None
        """Number of calls that were still to come when a place was last asked for, and when they would be due."""
        self._promises: dict[str, str] = {}
        """Member by sample key."""
        self._offers: dict[str, list[tuple[str, HeldCall]]] = {}
        """Calls that members offer to resume, each with its member, by sample key."""

    def published(self, version: int, now_s: float) -> None:
        """Take note of a new version of the weights."""
        self.newest, self.now_s = version, now_s
        self._pace.published(version, now_s)

    def least(self, least_version: int) -> int:
        """Return the oldest version that may decode a call."""
        return max(least_version, self.newest) if self._exact else least_version

    def candidates(self) -> list[Candidate]:
        """Return the members that may get calls, as the dispatch rule sees them."""
        return self._ranking.candidates(self.newest, self._pace.since_s(self.now_s))

    # -- promises -------------------------------------------------------------------------------------------------

    def takes_one(
        self, least_version: int, max_new_tokens: int, *, num_waiting: int = 0, max_staleness: int | None = None
    ) -> bool:
        """Return whether ``promise`` would keep a place now."""
        return self._choose_for_first(least_version, max_new_tokens, num_waiting, max_staleness) is not None

    def promise(
        self,
        sample_key: str,
        least_version: int,
        max_new_tokens: int,
        *,
        num_waiting: int = 0,
        max_staleness: int | None = None,
        until_s: float,
    ) -> int | None:
        """Keep a place, until ``until_s``, for the first call of a group, which will be opened soon. Returns the
        version that its member serves; ``None`` when no member should get the call now. See ``CallPlacement.reserve``.
        """
        name = self._choose_for_first(least_version, max_new_tokens, num_waiting, max_staleness)
        if name is None:
            return None
        self._take_back(sample_key)
        member = self._members[name]
        member.reserved[sample_key] = until_s
        self._promises[sample_key] = name
        self._ranking.changed(member)
        return member.version

    def _take_back(self, sample_key: str) -> SwarmMember | None:
        """End a promise. Returns the member that it named."""
        member = self._members.get(self._promises.pop(sample_key, ""))
        if member is None or member.reserved.pop(sample_key, None) is None:
            return None
        self._ranking.changed(member)
        return member

    def lapse(self, member: SwarmMember, now_s: float) -> None:
        """End the promises that were not taken up in time."""
        for key in [key for key, until_s in member.reserved.items() if until_s <= now_s]:
            self._take_back(key)

    # -- offers ---------------------------------------------------------------------------------------------------

    def offer(self, member: SwarmMember, offers: Iterable[HeldCall]) -> list[Effect]:
        """Record calls that a member could resume: it does where one of the sample waits; else it may be asked
        for one later. A member may hold several calls of one sample, where it was given the sample again before the
        first of them was durable. It is told to forget calls of samples that it was never given."""
        effects: list[Effect] = []
        for told in offers:
            if (sample_key := self._keys.opened(member.name, told.sample_key)) is None:
                effects.append(Send(member.lease, Release(call_ids=(told.call_id,))))
                continue
            held = member.held[told.call_id] = structs.replace(told, sample_key=sample_key)
            self._offers.setdefault(sample_key, []).append((member.name, held))
        for sample_key in dict.fromkeys(held.sample_key for held in member.held.values()):
            call_id = self._calls.waiting.of_sample(sample_key)
            call = None if call_id is None else self._calls.get(call_id)
            if call_id is not None and call is not None:
                effects += self._adopted(call_id, call)
        return effects

    def forget(self, member: SwarmMember) -> None:
        """Forget the promises and the offers of a member."""
        for held in list(member.held.values()):
            self._let_go(member, held)
        for key in list(member.reserved):
            self._promises.pop(key, None)
        member.reserved.clear()

    def withdraw(self, sample_key: str) -> list[Effect]:
        """Have members let go of what they offer of a sample that is finished."""
        return [self._released(self._members[name], held) for name, held in list(self._offers.get(sample_key, ()))]

    def _released(self, member: SwarmMember, held: HeldCall) -> Effect:
        self._let_go(member, held)
        return Send(member.lease, Release(call_ids=(held.call_id,)))

    def _let_go(self, member: SwarmMember, held: HeldCall) -> None:
        offers = self._offers[held.sample_key]
        offers.remove((member.name, held))
        if not offers:
            del self._offers[held.sample_key]
        del member.held[held.call_id]

    # -- calls ----------------------------------------------------------------------------------------------------

    def place(self, call_id: str, call: SwarmCall) -> list[Effect]:
        """Give a new call to a member, or have it wait."""
        effects, member = self._adopted(call_id, call), self._take_back(call.request.sample_key)
        if call.member is None and member is not None:
            version = member.serves(checked=self._checks)
            if version is not None and version >= call.least_version:
                return [*effects, *self.assign(call_id, call, member)]
        return effects if call.member is not None else [*effects, *self.place_waiting()]

    def place_waiting(self) -> list[Effect]:
        """Give waiting calls to members as far as there is room.

        Of calls that are alike (as long, for the same versions, due as early) one that has to wait speaks for all: what
        is given away meanwhile leaves less room and less work, and so can only be one more reason to wait.
        """
        effects: list[Effect] = []
        waiting, ranking = self._calls.waiting, self._ranking
        versions = [version for version in waiting.versions if ranking.has_room(version)]
        refused: set[tuple[int, int, int, int | None]] = set()
        for call_id in waiting.accepting(versions):
            call = self._calls.get(call_id)
            assert call is not None, "calls that wait are open"
            alike = call.least_version, call.position, call.limit, call.due_version
            if alike in refused:
                continue
            name = self._choose_for(call)
            if name is not None:
                effects += self.assign(call_id, call, self._members[name])
            elif not ranking.has_room(min(versions)):
                break
            else:
                refused.add(alike)
        return effects

    def assign(self, call_id: str, call: SwarmCall, member: SwarmMember) -> list[Effect]:
        """Give a call to a member."""
        self._calls.give(call_id, member)
        return [self._calls.assignment(call_id, member)]

    def _adopted(self, call_id: str, call: SwarmCall) -> list[Effect]:
        """Have a member resume a call of the sample that it holds, where one does: of several, the call that reaches
        furthest. A member is told to forget those that do not join the response where it stands, and once it has
        resumed one, its others of the sample."""
        position = call.position
        named = ((self._members[name], held) for name, held in self._offers.get(call.request.sample_key, ()))
        offers = [(member, held) for member, held in named if member.is_connected]
        fitting = [(m, held) for m, held in offers if held.start <= position <= held.end <= call.limit]
        adopter, adopted = max(fitting, key=lambda offer: offer[1].end, default=(None, None))
        effects: list[Effect] = []
        for member, held in offers:
            if held is not adopted and (member is adopter or (member, held) not in fitting):
                effects.append(self._released(member, held))
        if adopter is None or adopted is None:
            return effects
        self._let_go(adopter, adopted)
        self._calls.give(call_id, adopter, held_as=adopted.call_id)
        self._counters.adopted_calls += 1
        self._counters.late_accepted += adopter.is_late
        return [*effects, Send(adopter.lease, call.adoption(adopted.call_id, call_id))]

    def _choose_for_first(
        self, least_version: int, limit: int, num_waiting: int, max_staleness: int | None
    ) -> str | None:
        """Choose for the first call of a group, which starts under the version of the member that gets it."""
        deadline = None
        if max_staleness is not None:
            deadline = self._pace.of_first(self.newest, max_staleness, self.now_s)
        self._to_come = num_waiting, deadline
        kind = "first", least_version, max_staleness
        return self._choose(self.least(least_version), 0, limit, deadline, kind)

    def _choose_for(self, call: SwarmCall) -> str | None:
        deadline = None
        if call.due_version is not None:
            deadline = self._pace.of_started(call.due_version, self.now_s)
        kind = call.least_version, call.due_version
        return self._choose(call.least_version, call.position, call.limit, deadline, kind)

    def _choose(
        self, least_version: int, num_decoded: int, limit: int, deadline: Deadline | None, kind: Hashable
    ) -> str | None:
        """Return the member that the dispatch rule chooses. Where the rule has held back calls of this ``kind`` for as
        long as the fastest member with room would have taken, that member."""
        if not self._ranking.has_room(least_version):
            return None
        typical = self.remaining.expected(0, limit)
        work = Work(
            least_version=least_version,
            remaining_tokens=self.remaining.expected(num_decoded, limit),
            mean_remaining_tokens=typical / 2,
            horizon_s=self._horizon_s(deadline, typical),
            deadline=None if self._exact else deadline,
        )
        elapsed_s = self._pace.since_s(self.now_s)
        if (name := self._ranking.choose(work, self.newest, elapsed_s)) is not None:
            self._patience.given(kind, self.now_s)
            return name
        fastest = self._ranking.fastest(work, self.newest, elapsed_s)
        if fastest is None or fastest[0] > self._patience.waited_s(kind, self.now_s):
            return None
        return fastest[1]

    def _horizon_s(self, deadline: Deadline | None, typical: float) -> float:
        """Return the time in which all members together would be done with the calls that are due no later: in
        sequential pull with all calls. A response that is never due holds up no other."""
        num_to_come, due_then = self._to_come
        if self._exact:
            num_calls = self._calls.num_left() + num_to_come
        elif deadline is None:
            return math.inf
        else:
            num_calls = self._calls.num_left(deadline.due_version)
            if due_then is not None and due_then.due_version <= deadline.due_version:
                num_calls += num_to_come
        return self._ranking.drain_s(num_calls * typical)
