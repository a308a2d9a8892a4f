"""Calls that members kept and offer to resume, such as after a restart of the trainer.

Invariants: tokens of a journaled sample that a connected member offers are not decoded again; an offer is believed only
of a sample that its member was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import structs

from rollover.swarm.coordinator.machine.calls.call import SwarmCall
from rollover.swarm.coordinator.machine.calls.sample_keys import SampleKeys
from rollover.swarm.coordinator.machine.effects import Effect, Send
from rollover.swarm.coordinator.machine.members import SwarmMember
from rollover.swarm.wire.messages import HeldCall, Release


class Offers:
    """The offers by sample. A member may hold several calls of one sample, if it was given the sample again before the
    first of them was durable.

    Args:
        members: the swarm's, by name.
        keys: by which members know samples.
    """

    def __init__(self, members: Mapping[str, SwarmMember], keys: SampleKeys) -> None:
        self._members, self._keys = members, keys
        self._offers: dict[str, list[tuple[str, HeldCall]]] = {}
        """Calls, each with its member, by sample key."""

    def add(self, member: SwarmMember, offers: Iterable[HeldCall]) -> list[Effect]:
        """Record what a member offers; it is told to forget calls of samples that it was never given."""
        effects: list[Effect] = []
        for told in offers:
            if (sample_key := self._keys.opened(member.name, told.sample_key)) is None:
                effects.append(Send(member.lease, Release(call_ids=(told.call_id,))))
                continue
            held = member.held[told.call_id] = structs.replace(told, sample_key=sample_key)
            self._offers.setdefault(sample_key, []).append((member.name, held))
        return effects

    def taken(self, call: SwarmCall) -> tuple[list[Effect], tuple[SwarmMember, str] | None]:
        """Return the member that is to resume a call, and the id of what it holds: of several offers, the furthest.
        Members are told to forget offers that do not continue the response from where it is, and the other offers of
        that member. Without a journal nothing shows that an earlier process meant the same call by this key."""
        position = call.position
        named = ((self._members[name], held) for name, held in self._offers.get(call.request.sample_key, ()))
        offers = [(member, held) for member, held in named if member.is_connected]
        is_same = call.request.is_journaled
        fitting = [(m, held) for m, held in offers if is_same and held.start <= position <= held.end <= call.limit]
        adopter, adopted = max(fitting, key=lambda offer: offer[1].end, default=(None, None))
        effects: list[Effect] = []
        for member, held in offers:
            if held is not adopted and (member is adopter or (member, held) not in fitting):
                effects.append(self._released(member, held))
        if adopter is None or adopted is None:
            return effects, None
        self._let_go(adopter, adopted)
        return effects, (adopter, adopted.call_id)

    def withdraw(self, sample_key: str) -> list[Effect]:
        """Have members let go of what they offer of a sample that is finished."""
        return [self._released(self._members[name], held) for name, held in list(self._offers.get(sample_key, ()))]

    def forget(self, member: SwarmMember) -> None:
        for held in list(member.held.values()):
            self._let_go(member, held)

    def _released(self, member: SwarmMember, held: HeldCall) -> Effect:
        self._let_go(member, held)
        return Send(member.lease, Release(call_ids=(held.call_id,)))

    def _let_go(self, member: SwarmMember, held: HeldCall) -> None:
        offers = self._offers[held.sample_key]
        offers.remove((member.name, held))
        if not offers:
            del self._offers[held.sample_key]
        del member.held[held.call_id]
