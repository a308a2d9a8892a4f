"""The open calls of a swarm: each waits for a member or is with one, until it ends, fails or is cut off.

Invariants: a call is with one member at most; it ends exactly once; its member is told when it is no longer wanted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from rollover.engine.base import Chunk
from rollover.swarm.coordinator.machine.calls.call import SwarmCall
from rollover.swarm.coordinator.machine.calls.sample_keys import SampleKeys
from rollover.swarm.coordinator.machine.effects import Deliver, Effect, Fail, Send
from rollover.swarm.coordinator.machine.members import SwarmMember
from rollover.swarm.wire.messages import Abort, Ack, HeldCall, ProtocolError, Release


class WaitingCalls:
    """The calls without a member, in order of arrival, by the oldest version that each accepts and by sample."""

    def __init__(self) -> None:
        self._by_version: dict[int, dict[str, None]] = {}
        self._of_sample: dict[str, str] = {}
        """Call by sample key."""
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def versions(self) -> list[int]:
        """Return the versions that are the oldest for some call, in order."""
        return sorted(self._by_version)

    def accepting(self, version: int) -> list[str]:
        """Return the calls for which ``version`` is the oldest."""
        return list(self._by_version.get(version, ()))

    def of_sample(self, sample_key: str) -> str | None:
        return self._of_sample.get(sample_key)

    def add(self, call_id: str, call: SwarmCall) -> None:
        self._num += 1
        self._by_version.setdefault(call.least_version, {})[call_id] = None
        self._of_sample[call.request.sample_key] = call_id

    def discard(self, call_id: str, call: SwarmCall) -> None:
        """Forget a call, if it is waiting."""
        calls = self._by_version.get(call.least_version, {})
        if call_id not in calls:
            return
        del calls[call_id]
        self._num -= 1
        if not calls:
            del self._by_version[call.least_version]
        if self._of_sample.get(call.request.sample_key) == call_id:
            del self._of_sample[call.request.sample_key]


@dataclass(slots=True)
class Holding:
    """The tokens of one call at its member."""

    member: str
    sample_key: str
    acked: int
    """Position after the last token that is durable."""
    end: int | None = None
    """Position of its end, once that is known here."""


class Acknowledgements:
    """Follows calls from their member to the journal: from the moment at which a member gets a call until its end is
    known and all of its tokens are durable, or until it is no longer wanted."""

    def __init__(self) -> None:
        self._holdings: dict[str, Holding] = {}
        self._of_sample: dict[str, list[str]] = {}
        """Calls of each sample: several if an earlier call has ended and is not durable."""

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
        """Record that the member of these calls, which have ended here, is gone. If all received tokens of a call are
        durable, tokens that the member may still hold of it count as not asked for yet."""
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

    def durable(self, sample_key: str, num_tokens: int) -> Iterator[tuple[str, Ack]]:
        """Yield, each with its member, the acknowledgements due once ``num_tokens`` of a response are durable."""
        for call_id in list(self._of_sample.get(sample_key, ())):
            holding = self._holdings[call_id]
            is_over = holding.end is not None and num_tokens >= holding.end
            offset = num_tokens if holding.end is None else min(num_tokens, holding.end)
            if offset > holding.acked or is_over:
                holding.acked = max(holding.acked, offset)
                yield holding.member, Ack(call_id=call_id, offset=holding.acked, is_over=is_over)
            if is_over:
                self.dropped(call_id)


class SwarmCalls:
    """The calls by id, with what of them has yet to be written down.

    Args:
        members: the swarm's, by name.
        keys: by which members know samples.
        changed: called when the load of a member has changed.
    """

    def __init__(
        self,
        members: Mapping[str, SwarmMember],
        keys: SampleKeys,
        changed: Callable[[SwarmMember], None],
        *,
        newest: int,
    ) -> None:
        self._members, self._keys, self._changed = members, keys, changed
        self._calls: dict[str, SwarmCall] = {}
        self._halves: Counter[int | None] = Counter()
        """Half calls that are left, by the version at whose publication they are waited for: two where a call has yet
        to begin, one on average while it runs."""
        self.waiting = WaitingCalls()
        self.acknowledgements = Acknowledgements()
        self.newest = newest
        """The newest version, which a call claims that is cut off without a token."""

    @property
    def num_running(self) -> int:
        """Return the number of calls that are with a member."""
        return len(self._calls) - len(self.waiting)

    def num_left(self, due_version: int | None = None) -> float:
        """Count calls, running ones as halves; with ``due_version`` only those due by that version."""
        halves = self._halves.items()
        return sum(n for v, n in halves if due_version is None or (v is not None and v <= due_version)) / 2

    def __getitem__(self, call_id: str) -> SwarmCall:
        return self._calls[call_id]

    def get(self, call_id: str) -> SwarmCall | None:
        return self._calls.get(call_id)

    def of(self, member: SwarmMember) -> Iterator[tuple[str, SwarmCall]]:
        for call_id in sorted(member.calls):
            yield call_id, self._calls[call_id]

    def add(self, call_id: str, call: SwarmCall) -> None:
        self._calls[call_id] = call
        self._halves[call.due_version] += 2
        self.waiting.add(call_id, call)

    def give(self, call_id: str, member: SwarmMember, now_s: float, *, held_as: str = "") -> None:
        """Give the call to a member; ``held_as``: the id under which the member held it before."""
        call = self._calls[call_id]
        self.waiting.discard(call_id, call)
        self._halves[call.due_version] -= 1
        call.member, call.held_as, call.heard_s = member.name, held_as, now_s
        if not held_as:  # what it held may be older; but its engine never goes back
            call.least_version = max(call.least_version, member.version or 0)
        member.calls.add(call_id)
        self._changed(member)
        self.acknowledgements.given(call_id, call.request.sample_key, member.name, call.position)

    def assign(self, call_id: str, member: SwarmMember, now_s: float) -> Effect:
        """Give a new call to a member, and return the message that does; a call that checks it has no sealed key."""
        self.give(call_id, member, now_s)
        call, sample_key = self._calls[call_id], self._calls[call_id].request.sample_key
        told = sample_key if call.is_directed else self._keys.sealed(member.name, sample_key)
        return Send(member.lease, call.assignment(call_id, told))

    def ended(self, call_id: str) -> None:
        """Forget a call that is over here: all of its tokens have come out, or the rest is no longer wanted."""
        if (call := self._calls.pop(call_id, None)) is None:
            return
        due_version = call.due_version
        self._halves[due_version] -= 2 if call.member is None else 1
        if not self._halves[due_version]:
            del self._halves[due_version]
        self.waiting.discard(call_id, call)
        if call.request.is_journaled:
            self.acknowledgements.ended(call_id, call.position)
        else:
            self.acknowledgements.dropped(call_id)
        if call.member is not None:
            member = self._members[call.member]
            member.calls.discard(call_id)
            self._changed(member)

    def failed(
        self, member: SwarmMember, reason: str, call_ids: Collection[str], *, is_displaced: bool = False
    ) -> list[Effect]:
        """End calls of a member with an error, or with what has arrived if they were to be stopped anyway.
        ``is_displaced``: other members can continue them."""
        effects: list[Effect] = []
        for call_id in sorted(call_ids):
            call = self._calls[call_id]
            effects.append(self._cut(call_id, call) if call.is_aborted else Fail(call_id, reason, is_displaced))
            self.ended(call_id)
        return effects

    def aborted(self, call_ids: Iterable[str]) -> list[Effect]:
        """Stop calls. Calls without a member end at once; calls of a member that is gone end with what they have."""
        effects: list[Effect] = []
        by_member: dict[str, list[str]] = {}
        for call_id in call_ids:
            call = self._calls.get(call_id)
            if call is None or call.is_aborted:
                continue
            call.is_aborted = True
            member = self._members[call.member] if call.member is not None else None
            if member is None or not member.is_connected:
                effects.append(self._cut(call_id, call))
            else:
                by_member.setdefault(member.name, []).append(call_id)
        effects += [Send(self._members[n].lease, Abort(call_ids=tuple(ids))) for n, ids in by_member.items()]
        return effects

    def cut(self, call_ids: Iterable[str]) -> list[Effect]:
        """End calls with what has arrived, since their member does not answer; it is to forget the rest."""
        effects: list[Effect] = []
        for call_id in call_ids:
            if (call := self._calls.get(call_id)) is not None:
                member = self._members.get(call.member or "")
                effects.append(self._cut(call_id, call))
                if member is not None and member.is_connected:
                    self.acknowledgements.dropped(call_id)
                    effects.append(Send(member.lease, Release(call_ids=(call_id,))))
        return effects

    def durable(self, sample_key: str, num_tokens: int) -> list[Effect]:
        """Acknowledge what is due now that the first ``num_tokens`` of a sample's response are written down."""
        due = self.acknowledgements.durable(sample_key, num_tokens)
        return [Send(self._members[name].lease, ack) for name, ack in due if self._members[name].is_connected]

    def arrived(self, member: SwarmMember, call_id: str, offset: int, chunk: Chunk) -> list[Effect]:
        """Take the tokens of a call from position ``offset`` on from its member. Raises ``OutOfOrder`` if they are not
        the next, and ``ProtocolError`` if the member has not confirmed their version."""
        call, version = self._calls[call_id], chunk.policy_version
        if chunk.token_ids and version not in member.served:
            raise ProtocolError(f"it sent tokens of version {version}, which it has not confirmed to serve")
        delivered = call.came_out(offset, chunk)
        if not delivered.token_ids and delivered.finish_reason is None:
            return []
        effects: list[Effect] = [Deliver(call_id, delivered)]
        if not call.request.is_journaled:
            effects.append(Send(member.lease, Ack(call_id=call_id, offset=call.position, is_over=call.is_over)))
        return effects

    def resumed(self, member: SwarmMember, call_id: str, held: HeldCall) -> list[Effect] | None:
        """Tell a member that is back with a call what has become of it; ``None`` if that is not one of its calls."""
        holding, call = self.acknowledgements.get(call_id), self._calls.get(call_id)
        if holding is None or holding.member != member.name:
            return None
        effects: list[Effect] = []
        if held.start < holding.acked <= held.end:
            effects.append(Send(member.lease, Ack(call_id=call_id, offset=holding.acked)))
        if call is not None:
            effects.append(Send(member.lease, call.adoption(call_id, call_id)))
        if call.is_aborted if call is not None else held.is_running:
            effects.append(Send(member.lease, Abort(call_ids=(call_id,))))
        return effects

    def _cut(self, call_id: str, call: SwarmCall) -> Effect:
        end = call.ending(self.newest)
        self.ended(call_id)
        return Deliver(call_id, end)
