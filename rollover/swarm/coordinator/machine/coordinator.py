"""The coordinator: members, leases, versions and calls. Pure: no network, no clock, no engine.

A shell reports what has happened and when, and carries out the effects that it returns.

::

    connected ──Ready──▶ engine open ──Serving──▶ version confirmed ──(log-prob check)──▶ gets calls
        │                                                                                  │
        └── disconnected: keeps lease and calls ──ttl without a word──▶ lease ended: its calls fail

Invariants: a call is with one member at most; its tokens come out once, in order and only under versions that
the member has confirmed and the call accepts; a message under a lease that has ended changes nothing; messages
arrive in order and once, or the connection and its lease end; no lease outlives ``ttl_s`` of silence.
"""

from __future__ import annotations

from collections.abc import Iterable
from secrets import token_bytes

from rollover.engine.base import GenerateRequest
from rollover.swarm.coordinator.machine.assignments import Assignments
from rollover.swarm.coordinator.machine.calls.call import OutOfOrder, SwarmCall, checked_chunk
from rollover.swarm.coordinator.machine.calls.offers import Offers
from rollover.swarm.coordinator.machine.calls.open_calls import SwarmCalls
from rollover.swarm.coordinator.machine.calls.sample_keys import SampleKeys
from rollover.swarm.coordinator.machine.effects import (
    Changed,
    CheckLogprobs,
    Effect,
    Fail,
    Send,
    SentAway,
    ServesAnew,
)
from rollover.swarm.coordinator.machine.members import COUNTERS, RunIdentity, SwarmMember, brief
from rollover.swarm.coordinator.machine.publications import Epoch, Publications
from rollover.swarm.wire import messages
from rollover.types import FinishReason

NUM_SERVED = 64
"""Versions of a member that are remembered."""

_TWICE = "another process has joined with the token of {!r} and has taken its place: each worker needs its own token"


class Coordinator:
    """Assigns calls to the members of a swarm and puts their tokens in order.

    Args:
        ttl_s: a lease ends when its member has not been heard from for this long.
        exact: assign calls to members with the newest version only (sequential pull), not to all whose version a call
            accepts (asynchronous push-pull).
        checks: a member gets calls under a version only when ``checked`` has said that it samples from it.
        secret: by which a coordinator that is started after this one knows which samples it gave to which member;
            without it, none of these calls is resumed.
    """

    def __init__(
        self,
        run: RunIdentity,
        head: messages.Head,
        *,
        ttl_s: float,
        exact: bool,
        checks: bool,
        blob_urls: tuple[str, ...] = (),
        earlier: Iterable[tuple[Epoch, messages.Head]] = (),
        secret: bytes | None = None,
    ) -> None:
        self.run = run
        self.head = head
        self.members: dict[str, SwarmMember] = {}
        self.counters = dict.fromkeys(COUNTERS, 0)
        """Counts of what the protocol absorbed."""
        self.checks = checks
        self._ttl_s = ttl_s
        self._blob_urls = blob_urls
        self._publications = Publications(earlier)
        if head.manifest:
            self._publications.add(head)
        self._leases: dict[int, SwarmMember] = {}
        self.last_lease = 0
        keys = SampleKeys(secret or token_bytes(32))
        self._calls = SwarmCalls(
            self.members, keys, lambda member: self._assignments.changed(member), newest=head.version
        )
        self._offers = Offers(self.members, keys)
        self._assignments = Assignments(
            self.members, self._calls, self._offers, self.counters, exact=exact, checks=checks, max_silent_s=ttl_s
        )
        self._assignments.newest = head.version
        self.takes_one, self.reserve = self._assignments.takes_one, self._assignments.promise
        self.aborted, self.cut, self.journaled = self._calls.aborted, self._calls.cut, self._calls.durable

    # -- connections ------------------------------------------------------------------------------------------

    def connected(self, name: str, hello: messages.Hello, now_s: float) -> list[Effect]:
        """Admit a worker that has opened a connection and shown the token of ``name``."""
        member = self.members.setdefault(name, SwarmMember(name))
        effects: list[Effect] = []
        if member.lease and member.is_connected:
            effects.append(self._goodbye(member.lease, _TWICE.format(name), is_final=True))
        self._leases.pop(member.lease, None)
        self.last_lease += 1
        member.lease = self.last_lease
        self._leases[member.lease] = member
        if refusal := member.refusal(hello):
            return [*effects, self._goodbye(member.lease, refusal, is_final=True), *self._ended(member, refusal)]
        member.is_connected, member.heard_s, member.is_revoked = True, now_s, False
        member.is_late, member.has_lapsed = member.has_lapsed, False
        member.ready = member.version = member.checked_version = None
        member.last_heartbeat, self._assignments.now_s = 0, now_s
        self._assignments.changed(member)
        effects += [Send(member.lease, self._welcome(member)), *self._take_up(member, hello)]
        for _, call in self._calls.of(member):
            call.heard_s = now_s
        return effects

    def _welcome(self, member: SwarmMember) -> messages.Welcome:
        return messages.Welcome(
            protocol=messages.PROTOCOL,
            member=member.name,
            lease=member.lease,
            ttl_s=self._ttl_s,
            run_id=self.run.run_id,
            run_epoch=self.run.run_epoch,
            head=self.head,
            blob_urls=self._blob_urls,
        )

    def _take_up(self, member: SwarmMember, hello: messages.Hello) -> list[Effect]:
        """Resume the open calls that a worker holds; remember the others as offers; fail those it has lost."""
        self._assignments.forget(member)
        started_again = f"{member.name} was started again"
        if hello.run_id != self.run.run_id:
            member.served.clear()
            return self._assignments.lost(member, started_again, set(member.calls))
        held = {call.call_id: call for call in hello.held}
        effects: list[Effect] = []
        if held and not all(map(self._publications.knows, hello.served)):
            effects.append(Send(member.lease, messages.Release(call_ids=tuple(held))))
            held = {}
        member.served.update((head.version, head.manifest) for head in hello.served if self._publications.knows(head))
        effects += self._assignments.lost(member, started_again, member.calls - held.keys())
        offers = []
        for call_id, offer in held.items():
            if (answers := self._calls.resumed(member, call_id, offer)) is not None:
                effects += answers
            else:
                offers.append(offer)
        effects += self._offers.add(member, offers)
        for sample_key in dict.fromkeys(held.sample_key for held in member.held.values()):
            if (waiting_id := self._calls.waiting.of_sample(sample_key)) is not None:
                effects += self._assignments.adopt(waiting_id)
        return effects

    def disconnected(self, lease: int, now_s: float) -> list[Effect]:
        """Record that the connection of a lease is gone; the lease lasts until its time is over."""
        if (member := self._leases.get(lease)) is not None:
            member.is_connected = False
            self._assignments.changed(member)
            return [Changed(f"{member.name} has lost its connection")]
        return []

    def expire(self, now_s: float) -> list[Effect]:
        """End the leases of members that have been silent for longer than ``ttl_s``, and promises that lapsed."""
        self._assignments.now_s = now_s
        effects: list[Effect] = []
        for lease, member in list(self._leases.items()):
            self._assignments.lapse(member, now_s)
            if now_s - member.heard_s > self._ttl_s:
                self.counters["expired_leases"] += 1
                member.has_lapsed = True
                reason = f"{member.name} has not been heard from for {self._ttl_s:g} s"
                if member.is_connected:
                    effects.append(self._goodbye(lease, reason, is_final=False))
                effects += self._ended(member, reason)
        return effects

    def move_calls(self, now_s: float) -> list[Effect]:
        """Take calls from members that hold up a batch, if faster ones have room; they fail, and continue there."""
        self._assignments.now_s = now_s
        return self._assignments.move()

    def _ended(self, member: SwarmMember, reason: str, *, has_left: bool = False) -> list[Effect]:
        """Take the lease of a member away. Its calls fail; ``has_left``: it handed them over."""
        self._leases.pop(member.lease, None)
        member.is_connected, member.lease, member.last_error = False, 0, reason
        member.ready = member.version = member.checked_version = None
        self._assignments.forget(member)
        self._assignments.changed(member)
        call_ids = set(member.calls)
        if has_left:
            failed = self._calls.failed(member, reason, call_ids, is_displaced=True)
        else:
            failed = self._assignments.lost(member, reason, call_ids)
        self._calls.acknowledgements.lapsed(call_ids)
        return [*failed, Changed(reason)]

    def _goodbye(self, lease: int, reason: str, *, is_final: bool) -> Effect:
        return Send(lease, messages.Goodbye(reason=reason, is_final=is_final))

    # -- messages ---------------------------------------------------------------------------------------------

    def received(self, lease: int, message: messages.FromWorker, now_s: float) -> list[Effect]:
        """Handle ``message``, which a worker has sent under ``lease``."""
        member = self._leases.get(lease)
        if member is None or not member.is_connected:
            self.fenced(message)
            return []
        member.heard_s = self._assignments.now_s = now_s
        try:
            return self._handle(member, message)
        except OutOfOrder as e:
            self.counters["out_of_order"] += 1
            reason = f"{member.name} broke the order of messages: {e}"
            return [self._goodbye(lease, reason, is_final=False), *self._ended(member, reason)]
        except messages.ProtocolError as e:
            return self.distrust(member.name, str(e))

    def fenced(self, message: messages.FromWorker) -> None:
        """Count a message under a lease that has ended, or is not its sender's."""
        self.counters["fenced"] += 1
        if isinstance(message, messages.Decoded):
            self.counters["late_tokens"] += len(message.token_ids) // 4

    def _handle(self, member: SwarmMember, message: messages.FromWorker) -> list[Effect]:
        match message:
            case messages.Decoded():
                return self._decoded(member, message)
            case messages.Heartbeat():
                return [*self._beaten(member, message), *self._assignments.place_waiting()]
            case messages.CallFailed(call_id=call_id, reason=reason):
                said = f"{member.name}: {brief(reason)}"
                return [*self._assignments.failed(member, call_id, said), *self._assignments.place_waiting()]
            case messages.Ready():
                return [*self._is_ready(member, message), *self._assignments.place_waiting()]
            case messages.Serving():
                return [*self._serving(member, message), *self._assignments.place_waiting()]
            case messages.NotServing(version=version, reason=reason):
                said, known = f"version {version}: {brief(reason)}", member.last_error
                member.last_error = said
                return [] if said == known else [Changed(f"{member.name} has no new weights: {said}", is_warning=True)]
            case messages.Leaving(reason=reason):
                left = f"{member.name} has left: {brief(reason)}"
                bye = self._goodbye(member.lease, left, is_final=False)
                return [bye, *self._ended(member, left, has_left=True)]
            case messages.Hello():
                raise messages.ProtocolError("it sent a second hello on one connection")

    def _is_ready(self, member: SwarmMember, ready: messages.Ready) -> list[Effect]:
        if ready.max_running < 1:
            raise messages.ProtocolError(
                f"it says that it has room for {ready.max_running} calls, but it needs room for at least one"
            )
        if ready.max_context_tokens < self.run.max_context_tokens:
            reason = (
                f"its engine holds contexts of {ready.max_context_tokens} tokens, but the run needs"
                f" {self.run.max_context_tokens}: give the worker's engine a longer context"
            )
            return [self._goodbye(member.lease, reason, is_final=True), *self._ended(member, reason)]
        lacks = ""
        if self.run.returns_kept and not ready.gives_kept:
            lacks = "the tokens among which it draws, but the run needs them (rollout.top_p, top_k or min_p)"
        if self.run.returns_routes and not ready.gives_routes:
            lacks = "the experts that it chooses, but the run needs them (trainer.replay_routes)"
        if lacks:
            reason = f"its engine does not return {lacks}: give the worker an engine of kind 'embedded'"
            return [self._goodbye(member.lease, reason, is_final=True), *self._ended(member, reason)]
        if member.ready is not None and member.ready.keeps_kv != ready.keeps_kv:
            raise messages.ProtocolError(
                f"it says of its engine keeps_kv = {ready.keeps_kv}, but said {not ready.keeps_kv} before"
            )
        if member.ready is None:
            member.forget_error()  # what ended its last membership
        member.ready = member.declared = ready
        self._assignments.changed(member)
        return [Changed(f"{member.name} is ready")]

    def _serving(self, member: SwarmMember, serving: messages.Serving) -> list[Effect]:
        """Record a confirmed version. A version that was never published is a lie or a mix-up."""
        version, manifest = serving.version, serving.manifest
        if not self._publications.is_of_this_start(version, manifest):
            raise messages.ProtocolError(
                f"it says that it serves version {version} from a manifest that was not published"
            )
        if member.version is not None and version < member.version:
            return []  # within an epoch no engine goes back
        member.loaded(serving)
        self._assignments.changed(member)
        if version == member.version:
            return []
        effects: list[Effect] = [] if member.served.get(version) == manifest else [ServesAnew(member.name, serving)]
        member.version, member.served[version] = version, manifest
        member.forget_error()
        self._assignments.changed(member)
        for old in sorted(member.served)[:-NUM_SERVED]:
            del member.served[old]
        effects.append(Changed(f"{member.name} serves version {version}"))
        if self.checks and member.checked_version != version:
            effects.append(CheckLogprobs(member.name, version))
        return effects

    def _decoded(self, member: SwarmMember, message: messages.Decoded) -> list[Effect]:
        call = self._calls.get(message.call_id)
        if call is None or call.member != member.name:
            return []  # it has ended here: what it still says is of no use to anybody
        if member.declared is None:
            raise OutOfOrder("it sent tokens before it had described its engine")
        chunk = checked_chunk(
            message, call, newest=self.head.version, vocab_size=self.run.vocab_size, keeps_kv=member.declared.keeps_kv
        )
        before = call.position
        effects = self._calls.arrived(member, message.call_id, message.offset, chunk)
        if num_new := call.position - before:
            self._assignments.decoded(member, call, num_new)
        if call.refused_end:
            said = f"{member.name}: {call.refused_end}"
            if call.held_as and chunk.finish_reason is FinishReason.LENGTH:  # the limit of the call that it held
                refused = self._calls.failed(member, said, {message.call_id}, is_displaced=True)
            else:
                refused = self._assignments.failed(member, message.call_id, said)
            return [*effects, *refused, *self._assignments.place_waiting()]
        if call.is_over:
            if call.finish_reason is not FinishReason.ABORT and not call.is_directed:
                self._assignments.remaining.ended(call.position)
                effects += self._offers.withdraw(call.request.sample_key)
            self._calls.ended(message.call_id)
            effects += self._assignments.place_waiting()
        return effects

    def _beaten(self, member: SwarmMember, beat: messages.Heartbeat) -> list[Effect]:
        """Answer a heartbeat, which renews the lease and reports how fast the member is."""
        positions = {
            call_id: call.position
            for call_id, call in self._calls.of(member)
            if not (call.is_aborted or call.is_directed)
        }
        member.beaten(beat, positions, self._assignments.now_s)
        self._assignments.changed(member)
        return [Send(member.lease, messages.Beat(number=beat.number, head=self.head))]

    # -- versions and trust -----------------------------------------------------------------------------------

    def published(self, head: messages.Head, now_s: float) -> list[Effect]:
        """Announce a new version of the weights, which can be fetched now."""
        assert head.version >= self.head.version, "versions only grow"
        self.head, self._calls.newest = head, head.version
        self._assignments.published(head.version, now_s)
        self._publications.add(head)
        return [Send(member.lease, head) for member in self._leases.values() if member.is_connected]

    def checked(self, name: str, version: int) -> list[Effect]:
        """Record that the log-probs of a member belong to ``version``."""
        member = self.members[name]
        member.checked_version = version
        if version == self.head.version or member.last_error.startswith(f"log-prob check of version {version},"):
            member.forget_error()
        self._assignments.changed(member)
        return [
            Changed(f"{name} has passed the log-prob check of version {version}"),
            *self._assignments.place_waiting(),
        ]

    def distrust(self, name: str, reason: str) -> list[Effect]:
        """Send a member away for good; its calls fail."""
        member = self.members.get(name)
        if member is None or member.distrust:
            return []
        member.distrust = reason
        self.counters["workers_sent_away"] += 1
        said = f"{name} is no longer trusted: {reason}"
        bye = [self._goodbye(member.lease, said, is_final=True)] if member.lease else []
        return [*bye, SentAway(name, reason), *self._ended(member, said)]

    def block(self, name: str, reason: str) -> None:
        """Record that a member was sent away for good by an earlier process of this run."""
        self.members.setdefault(name, SwarmMember(name)).distrust = reason

    def readmitted(self, name: str) -> list[Effect]:
        """Let a member come back that was sent away for good, since a user has readmitted it."""
        if (member := self.members.get(name)) is None or not member.distrust:
            return []
        member.distrust = member.last_error = ""
        return [Changed(f"{name} may join again")]

    def revoked(self, name: str) -> list[Effect]:
        """Send away a member whose token is no longer valid; its calls fail. Its samples stay valid."""
        if (member := self.members.get(name)) is None or not member.lease:
            return []
        member.is_revoked = True
        reason = f"the token of {name!r} was revoked"
        return [self._goodbye(member.lease, reason, is_final=True), *self._ended(member, reason)]

    # -- calls ------------------------------------------------------------------------------------------------

    @property
    def max_running(self) -> int:
        """Return the number of calls that all members which may get some decode at the same time."""
        return self._assignments.max_running

    @property
    def num_running(self) -> int:
        """Return the number of calls that are with a member."""
        return self._calls.num_running

    @property
    def num_waiting(self) -> int:
        return len(self._calls.waiting)

    def opened(self, request: GenerateRequest, *, only: str | None = None) -> list[Effect]:
        """Open a call. It goes to a member at once or waits for one. With ``only`` it goes to that member or fails, and
        it may go there before the member's log-probs are checked."""
        call_id = request.request_id
        call = SwarmCall(request, self._assignments.least(request.least_version), is_directed=only is not None)
        self._calls.add(call_id, call)
        if only is None:
            return self._assignments.place(call_id, call)
        member = self.members[only]
        if member.serves(checked=False) is not None:
            return [self._assignments.assign(call_id, member)]
        self._calls.ended(call_id)
        what = "is not connected" if member.lease else f"is gone: {member.last_error}"
        return [Fail(call_id, f"{only} {what}")]
