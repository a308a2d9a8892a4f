"""Gives calls to members: by promise, by what they hold already, or by the placing rule; and takes calls from them.

Invariants: a promise is kept as long as its member can keep it; a call goes to a member whose weights it accepts, and
in sequential pull only to a member that has the newest.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from rollover.engine.base import FirstCall
from rollover.swarm.coordinator.machine.calls.call import SwarmCall
from rollover.swarm.coordinator.machine.calls.offers import Offers
from rollover.swarm.coordinator.machine.calls.open_calls import SwarmCalls
from rollover.swarm.coordinator.machine.effects import Changed, Effect, Send
from rollover.swarm.coordinator.machine.members import SwarmMember
from rollover.swarm.coordinator.machine.placing import rule
from rollover.swarm.coordinator.machine.placing.forecast import Deadline, Pace, RemainingTokens
from rollover.swarm.wire.messages import Release

NUM_REMEMBERED = 10_000
"""Samples that have failed and of which nothing has come since: some were dropped, which is not reported here."""
FORGOTTEN_S = 60.0
"""If no place was asked for during this time, the next first call has not been kept waiting."""


class Assignments:
    """Decides which member has which call.

    Args:
        members: the swarm's, by name.
        exact: calls go to members with the newest version only.
        checks: members get calls only under a version that passed the log-prob check.
        max_silent_s: time without a token after which that says how fast a call is.
    """

    def __init__(
        self,
        members: Mapping[str, SwarmMember],
        calls: SwarmCalls,
        offers: Offers,
        counters: dict[str, int],
        *,
        exact: bool,
        checks: bool,
        max_silent_s: float,
    ) -> None:
        self._members, self._calls, self._offers, self._counters = members, calls, offers, counters
        self._exact, self._checks, self._max_silent_s = exact, checks, max_silent_s
        self._crowd, self._pace = rule.Crowd(), Pace()
        self.remaining = RemainingTokens()
        self.newest = 0
        self.now_s = 0.0
        """Time at which something was last heard."""
        self.max_running = 0
        """Number of calls that all members which may get some decode at the same time."""
        self._rooms: dict[str, int] = {}
        self._to_come: tuple[int, Deadline | None] = 0, None
        """Number of calls that were still to come when a place was last asked for, and when they would be due."""
        self._first_waits: tuple[float, float] = -math.inf, -math.inf
        """Since when first calls are kept waiting, and when a place for one was last asked for."""
        self._promises: dict[str, str] = {}
        """Member by sample key."""
        self._failed: OrderedDict[str, None] = OrderedDict()
        """Keys of samples that have failed since their last token."""

    def changed(self, member: SwarmMember) -> None:
        """Record that a member has changed: its load, speed, weights, or whether it may get calls at all."""
        facts = member.facts(checked=self._checks)
        self._crowd.put(member.name, facts)
        room = member.ready.max_running if facts is not None and member.ready is not None else 0
        self.max_running += room - self._rooms.get(member.name, 0)
        self._rooms[member.name] = room

    def published(self, version: int, now_s: float) -> None:
        self.newest, self.now_s = version, now_s
        self._pace.published(version, now_s)

    def least(self, least_version: int) -> int:
        """Return the oldest version that may decode a call."""
        return max(least_version, self.newest) if self._exact else least_version

    # -- promises -------------------------------------------------------------------------------------------------

    def takes_one(self, call: FirstCall) -> bool:
        """Return whether ``promise`` would keep a place now."""
        return self._choose_for_first(call) is not None

    def promise(self, sample_key: str, call: FirstCall, *, until_s: float) -> int | None:
        """Keep a place, until ``until_s``, for the first call of a group, which will be opened soon. Returns the
        version that its member serves; ``None`` when no member should get the call now. See ``CallPlacement.reserve``.
        """
        name = self._choose_for_first(call)
        if name is None:
            return None
        self._take_back(sample_key)
        member = self._members[name]
        member.reserved[sample_key] = until_s
        self._promises[sample_key] = name
        self.changed(member)
        return member.version

    def _take_back(self, sample_key: str) -> SwarmMember | None:
        """End a promise. Returns the member that it named."""
        member = self._members.get(self._promises.pop(sample_key, ""))
        if member is None or member.reserved.pop(sample_key, None) is None:
            return None
        self.changed(member)
        return member

    def lapse(self, member: SwarmMember, now_s: float) -> None:
        """End the promises that were not taken up in time."""
        for key in [key for key, until_s in member.reserved.items() if until_s <= now_s]:
            self._take_back(key)

    def forget(self, member: SwarmMember) -> None:
        """Forget the promises and the offers of a member."""
        self._offers.forget(member)
        for key in list(member.reserved):
            self._promises.pop(key, None)
        member.reserved.clear()

    # -- calls ----------------------------------------------------------------------------------------------------

    def place(self, call_id: str, call: SwarmCall) -> list[Effect]:
        """Give a new call to a member, or have it wait."""
        call.waits_since_s = self.now_s
        effects, member = self.adopt(call_id), self._take_back(call.request.sample_key)
        if call.member is None and member is not None:
            version = member.serves(checked=self._checks)
            if version is not None and version >= call.least_version:
                return [*effects, self.assign(call_id, member)]
        return effects if call.member is not None else [*effects, *self.place_waiting()]

    def place_waiting(self) -> list[Effect]:
        """Give waiting calls to members as far as there is room.

        Of calls that are alike (as long, for the same versions, due as early) the longest waiting call speaks for
        all: what is given away meanwhile leaves less room and less work, and so can only be one more reason to wait.
        """
        effects: list[Effect] = []
        for version in self._calls.waiting.versions():
            refused: set[tuple[int, int, int | None]] = set()
            for call_id in self._calls.waiting.accepting(version):
                if not self._crowd.has_room(version):
                    break
                call = self._calls[call_id]
                alike = call.position, call.limit, call.due_version
                if alike in refused:
                    continue
                if (name := self._choose_for(call)) is not None:
                    effects.append(self.assign(call_id, self._members[name]))
                else:
                    refused.add(alike)
        return effects

    def assign(self, call_id: str, member: SwarmMember) -> Effect:
        return self._calls.assign(call_id, member, self.now_s)

    def adopt(self, call_id: str) -> list[Effect]:
        """Have a member resume a call without a member, if it holds one of the sample."""
        call = self._calls[call_id]
        effects, found = self._offers.taken(call)
        if found is None:
            return effects
        adopter, held = found
        self._calls.give(call_id, adopter, self.now_s, held_as=held)
        self._counters["adopted_calls"] += 1
        self._counters["late_accepted"] += adopter.is_late
        return [*effects, Send(adopter.lease, call.adoption(held, call_id))]

    # -- slow and failing members ---------------------------------------------------------------------------------

    def move(self) -> list[Effect]:
        """Take calls from members that hold up a batch, if faster ones have room that no waiting call was given."""
        effects: list[Effect] = []
        if not self._calls.num_running or not self._crowd.has_room(0):
            return effects
        found = rule.moves(self._movable(), self._crowd, self.remaining.expected, max_silent_s=self._max_silent_s)
        for call, tokens_per_s, left_s in list(found):
            member = self._members[call.member]
            member.found_slow(tokens_per_s)
            self.changed(member)
            self._calls.acknowledgements.dropped(call.call_id)
            reason = f"{member.name} would have taken another {left_s:.0f} s, while other workers are idle"
            effects += self._calls.failed(member, reason, {call.call_id}, is_displaced=True)
            effects.append(Send(member.lease, Release(call_ids=(call.call_id,))))
            self._counters["moved_calls"] += 1
        return effects

    def _movable(self) -> Iterator[rule.RunningCall]:
        for member in self._members.values():
            if not member.is_connected:
                continue  # nothing is known of it; its lease ends
            for call_id, call in self._calls.of(member):
                if not (call.is_directed or call.is_aborted):
                    yield rule.RunningCall(
                        call_id=call_id,
                        member=member.name,
                        least_version=call.least_version,
                        num_decoded=call.position,
                        limit=call.limit,
                        tokens_per_s=member.call_tokens_per_s,
                        silent_s=self.now_s - call.heard_s,
                    )

    def failed(self, member: SwarmMember, call_id: str, reason: str) -> list[Effect]:
        """Handle the failure of a call at its member, which is set aside."""
        call = self._calls.get(call_id)
        if call is None or call.member != member.name:
            return []
        if call.is_directed:
            return self._calls.failed(member, reason, {call_id})
        sample_key = call.request.sample_key
        others = (m for m in self._members.values() if m is not member and not (m.distrust or m.is_revoked))
        is_attempt = rule.counts_as_attempt(
            has_failed_before=sample_key in self._failed,
            num_failures=member.num_failures,
            fails_alone=member.failed_samples <= {sample_key},
            is_alone=not any(others),
        )
        effects: list[Effect] = []
        if not member.num_failures:
            effects.append(Changed(f"{reason}; it gets one call at a time, until one succeeds", is_warning=True))
        member.failed_a_call(sample_key, reason, self.now_s)
        self.changed(member)
        self._remember_failed(sample_key)
        return [*effects, *self._calls.failed(member, reason, {call_id}, is_displaced=not is_attempt)]

    def lost(self, member: SwarmMember, reason: str, call_ids: Iterable[str]) -> list[Effect]:
        """Handle calls that are gone with the memory of their member. A sample whose last call has failed too, with no
        token since, may be what ends its members: only then is it a failed attempt."""
        effects: list[Effect] = []
        for call_id in sorted(call_ids):
            call, sample_key = self._calls[call_id], self._calls[call_id].request.sample_key
            is_attempt = sample_key in self._failed
            if not (call.is_directed or call.is_aborted):
                self._remember_failed(sample_key)
            effects += self._calls.failed(member, reason, {call_id}, is_displaced=not is_attempt)
        return effects

    def _remember_failed(self, sample_key: str) -> None:
        self._failed[sample_key] = None
        if len(self._failed) > NUM_REMEMBERED:
            self._failed.popitem(last=False)

    def decoded(self, member: SwarmMember, call: SwarmCall, num_tokens: int) -> None:
        """Record new tokens of a call: neither its member nor its sample fails any more. The few of a log-prob check
        show only that the member answers."""
        call.heard_s = self.now_s
        member.num_decoded += num_tokens
        if not call.is_directed:
            self._failed.pop(call.request.sample_key, None)
            if member.num_failures:
                member.recovered()
                self.changed(member)

    # -- facts for the rule ---------------------------------------------------------------------------------------

    def _choose_for_first(self, call: FirstCall) -> str | None:
        """Choose for the first call of a group, which starts under the version of the member that gets it."""
        deadline = None
        if call.max_staleness is not None:
            deadline = self._pace.of_first(self.newest, call.max_staleness, self.now_s)
        self._to_come = call.num_waiting, deadline
        since_s, asked_s = self._first_waits
        if self.now_s - asked_s > FORGOTTEN_S:
            since_s = self.now_s
        facts = self._facts(self.least(call.least_version), 0, call.max_new_tokens, deadline)
        name = self._choose(facts)
        self._first_waits = self.now_s if name is not None else since_s, self.now_s
        return name if name is not None else self._choose(replace(facts, waited_s=self.now_s - since_s))

    def _choose_for(self, call: SwarmCall) -> str | None:
        deadline = None
        if call.due_version is not None:
            deadline = self._pace.of_started(call.due_version, self.now_s)
        facts = self._facts(call.least_version, call.position, call.limit, deadline)
        return self._choose(replace(facts, waited_s=self.now_s - call.waits_since_s))

    def _choose(self, call: rule.CallFacts) -> str | None:
        return rule.choose(self._crowd, call, newest=self.newest, age_s=self._pace.since_s(self.now_s))

    def _facts(self, least_version: int, num_decoded: int, limit: int, deadline: Deadline | None) -> rule.CallFacts:
        typical = self.remaining.expected(0, limit)
        return rule.CallFacts(
            least_version=least_version,
            tokens_left=self.remaining.expected(num_decoded, limit),
            mean_tokens_left=typical / 2,
            horizon_s=self._horizon_s(deadline, typical),
            deadline=None if self._exact else deadline,
        )

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
        return self._crowd.drain_s(num_calls * typical)
