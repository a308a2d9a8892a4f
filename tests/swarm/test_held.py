"""What a worker holds: whatever is cut, repeated, adopted or released, the receiver has the decoded stream in the end."""

from __future__ import annotations

import hashlib
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from rollover.engine.base import Chunk
from rollover.swarm.wire.messages import (
    MAX_HELD_CALLS,
    Adopt,
    CallFailed,
    Decoded,
    ProtocolError,
    pack_ids,
    unpack_ids,
    unpack_logprobs,
)
from rollover.swarm.worker import held_stream
from rollover.swarm.worker.held import HeldCalls, ServedHeads
from rollover.swarm.worker.held_stream import StreamEnding
from rollover.token_bytes import split_bytes
from rollover.types import FinishReason
from tests.speed import slowness
from tests.swarm.worker_kit import assign, head

LIMIT = 300


def chunk(ids: tuple[int, ...], version: int = 0) -> Chunk:
    return Chunk(
        token_ids=ids,
        logprobs=tuple(-i / 8 for i in ids),
        policy_version=version,
        kv_version=version,
        kept=tuple(bytes([i % 128]) for i in ids),
        routes=tuple(bytes([i % 7, 1]) for i in ids),
    )


def prefix(ids: tuple[int, ...]) -> str:
    return hashlib.sha256(pack_ids(ids)).hexdigest()


class Call:
    """A call from both ends: what was decoded, and what a receiver has made of the messages."""

    def __init__(self, call_id: str, done: tuple[int, ...]) -> None:
        self.call_id = call_id
        self.decoded = list(done)
        self.versions = [0] * len(done)
        self.received = list(done)
        self.received_versions = [0] * len(done)
        self.origin = len(done)
        self.acked = len(done)
        self.ending: FinishReason | str | None = None
        self.received_ending: str | None = None
        self.is_released = False


class HeldMachine(RuleBasedStateMachine):
    """Decodes, acknowledges, cuts, adopts, aborts and releases in any order; frames in flight are lost by a cut."""

    calls = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        self.held = HeldCalls(LIMIT, offer_s=1e9)
        self.known: list[Call] = []
        self.wire: list[Decoded | CallFailed] = []
        self.offered: list[Call] = []
        self.num_ids = self.num_tokens = 0

    def new_id(self) -> str:
        self.num_ids += 1
        return f"c{self.num_ids}"

    def of(self, call_id: str) -> Call | None:
        return next((call for call in self.known if call.call_id == call_id and not call.is_released), None)

    @rule(target=calls, num_done=st.integers(0, 5))
    def opened(self, num_done: int) -> Call:
        call = Call(self.new_id(), tuple(range(num_done)))
        message = assign(call.call_id, done=call.decoded)
        self.held.open(message)
        self.known.append(call)
        return call

    @rule(
        call=calls,
        num_tokens=st.integers(0, 9),
        version=st.integers(0, 2),
        ends=st.sampled_from([None, None, None, "stop"]),
        num_sent=st.sampled_from([0, 1, 9]),
    )
    def decoded(self, call: Call, num_tokens: int, version: int, ends: str | None, num_sent: int) -> None:
        stream = self.held._streams.get(call.call_id)
        if stream is None or call.ending is not None or self.held.is_full:
            return
        ids = tuple(range(self.num_tokens, self.num_tokens + num_tokens))
        self.num_tokens += num_tokens
        self.held.decoded(stream, chunk(ids, version))
        call.decoded += ids
        call.versions += [version] * num_tokens
        if ends is not None:
            self.end(call, FinishReason(ends))
        self.sent(num_sent)

    @rule(call=calls, failure=st.sampled_from(["", "out of memory"]), num_sent=st.sampled_from([0, 9]))
    def stopped(self, call: Call, failure: str, num_sent: int) -> None:
        if self.held._streams.get(call.call_id) is not None and call.ending is None:
            self.end(call, failure or FinishReason.ABORT)
            self.sent(num_sent)

    def end(self, call: Call, ending: FinishReason | str) -> None:
        stream = self.held._streams.get(call.call_id)
        assert stream is not None
        call.ending = ending
        reason = ending if isinstance(ending, FinishReason) else None
        self.held.ended(stream, StreamEnding(reason=reason, failure="" if reason else str(ending), version=2))

    def sent(self, num_messages: int) -> None:
        for _ in range(num_messages):
            if (message := self.held.next_message()) is not None:
                self.wire.append(message)

    @rule(num_messages=st.integers(1, 4))
    def received(self, num_messages: int) -> None:
        for message in self.wire[:num_messages]:
            self.receive(message)
        del self.wire[:num_messages]

    def receive(self, message: Decoded | CallFailed) -> None:
        if (call := self.of(message.call_id)) is None:
            return
        if isinstance(message, CallFailed):
            call.received_ending = message.reason
            return
        ids, logprobs = unpack_ids(message.token_ids), unpack_logprobs(message.logprobs)
        assert logprobs == tuple(-i / 8 for i in ids)
        assert split_bytes(message.kept, len(ids)) == tuple(bytes([i % 128]) for i in ids)
        assert split_bytes(message.routes, len(ids)) == tuple(bytes([i % 7, 1]) for i in ids)
        assert message.offset <= len(call.received), "a gap"
        skipped = len(call.received) - message.offset
        assert list(ids[:skipped]) == call.received[message.offset : message.offset + len(ids)]
        call.received += ids[skipped:]
        call.received_versions += [message.version] * len(ids[skipped:])
        if message.finish_reason is not None:
            assert len(call.received) == message.offset + len(ids)
            call.received_ending = message.finish_reason

    @rule(call=calls, back=st.integers(0, 4))
    def journaled(self, call: Call, back: int) -> None:
        """Acknowledgements may be old ones."""
        if call in self.offered:
            return
        offset = max(call.origin, len(call.received) - back)
        call.acked = max(call.acked, offset)
        self.held.acked(call.call_id, offset)

    @rule(lost=st.sampled_from([0, 1, 2, 9]))
    def cut_and_back(self, lost: int) -> None:
        """The last messages are lost, and the next connection offers what is held."""
        for message in self.wire[: max(0, len(self.wire) - lost)]:
            self.receive(message)
        self.wire.clear()
        offers = {offer.call_id: offer for offer in self.held.listed()}
        self.held.connected(0.0)
        assert self.held.next_message() is None
        self.offered = [call for call in self.known if call.call_id in offers and not call.is_released]
        for call in self.offered:
            offer = offers[call.call_id]
            assert (offer.start, offer.end) == (call.acked, len(call.decoded))
            assert offer.is_running == (call.ending is None)

    @precondition(lambda self: self.offered)
    @rule(renames=st.booleans(), data=st.data())
    def adopted(self, renames: bool, data: st.DataObject) -> None:
        """The coordinator goes on with an offer."""
        call = self.offered.pop(data.draw(st.integers(0, len(self.offered) - 1)))
        if not call.is_released:
            self.adopt(call, self.new_id() if renames else call.call_id)

    def adopt(self, call: Call, call_id: str) -> None:
        offset = len(call.received)
        message = Adopt(held=call.call_id, call_id=call_id, offset=offset, prefix=prefix(tuple(call.received)))
        assert not isinstance(self.held.adopt(message), CallFailed)
        if call_id != call.call_id:
            call.acked = offset
        call.call_id, call.received_ending = call_id, None
        if call.ending is FinishReason.ABORT:
            call.ending = None

    @rule(call=consumes(calls))
    def released(self, call: Call) -> None:
        self.held.release((call.call_id,))
        call.is_released = True
        assert self.held._streams.get(call.call_id) is None

    @precondition(lambda self: self.known)
    @rule()
    def drained(self) -> None:
        """When all offers are taken up and all messages arrive, the receiver has everything."""
        for call in self.offered:
            if not call.is_released:
                self.adopt(call, call.call_id)
        self.offered = []
        while (message := self.held.next_message()) is not None:
            self.wire.append(message)
        for message in self.wire:
            self.receive(message)
        self.wire.clear()
        for call in self.known:
            if not call.is_released:
                assert call.received == call.decoded
                assert call.received_versions == call.versions
                assert call.received_ending == call.ending

    @invariant()
    def what_is_held_is_what_nobody_has_acknowledged(self) -> None:
        open_calls = [call for call in self.known if self.held._streams.get(call.call_id) is not None]
        assert self.held.num_tokens == sum(len(call.decoded) - call.acked for call in open_calls)
        for call in self.known:
            assert call.is_released or self.held._streams.get(call.call_id) is not None, (
                "forgotten though nobody had said so"
            )

    @invariant()
    def a_received_stream_is_the_beginning_of_the_decoded_one(self) -> None:
        for call in self.known:
            assert call.received == call.decoded[: len(call.received)]


TestHeld = HeldMachine.TestCase
TestHeld.settings = settings(max_examples=120, stateful_step_count=50)


def test_a_worker_is_full_at_its_limit_until_three_quarters_of_it() -> None:
    held = HeldCalls(8)
    stream = held.open(assign("a"))
    held.decoded(stream, chunk(tuple(range(7))))
    assert not held.is_full
    held.decoded(stream, chunk((7,)))
    assert held.is_full
    held.acked("a", 2)
    assert held.is_full
    held.acked("a", 3)
    assert not held.is_full and held.num_tokens == 5


def test_tokens_of_one_version_go_out_together_each_call_in_its_turn() -> None:
    held = HeldCalls(100)
    for name in "ab":
        stream = held.open(assign(name))
        for version in (0, 0, 1):
            held.decoded(stream, chunk((1, 2), version))
    sent = []
    while (message := held.next_message()) is not None:
        assert isinstance(message, Decoded)
        sent.append((message.call_id, message.offset, len(unpack_ids(message.token_ids)), message.version))
    assert sent == [("a", 0, 4, 0), ("b", 0, 4, 0), ("a", 4, 2, 1), ("b", 4, 2, 1)]


def test_the_work_of_a_message_grows_with_its_tokens_alone() -> None:
    held = HeldCalls(10**6)
    stream = held.open(assign("a"))
    for number in range(30_000):  # an outage of minutes
        held.decoded(stream, chunk((number,)))
    began_s = time.process_time()
    sent: list[int] = []
    while isinstance(message := held.next_message(), Decoded):
        assert len(message.token_ids) <= 2**15
        sent += unpack_ids(message.token_ids)
    for number in range(200):
        held.decoded(stream, chunk((number,)))
        assert isinstance(again := held.next_message(), Decoded) and len(again.token_ids) == 4
    assert time.process_time() - began_s < 0.4 * slowness()
    assert sent == [*range(30_000)]
    held.acked("a", 29_999)
    assert stream.num_held == 201


def test_kept_sets_go_out_as_a_frame_has_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_stream, "_MAX_BESIDE_BYTES", 9)
    held = HeldCalls(100)
    stream = held.open(assign("a"))
    held.decoded(stream, chunk((1, 2)))
    held.decoded(stream, chunk((3, 4, 5)))
    held.ended(stream, StreamEnding(reason=FinishReason.STOP))
    sent = [held.next_message(), held.next_message(), held.next_message()]
    found = [(unpack_ids(m.token_ids), m.finish_reason) for m in sent if isinstance(m, Decoded)]
    assert found == [((1, 2, 3), None), ((4, 5), "stop")]


@pytest.mark.parametrize("message", ["assign", "adopt"])
def test_a_call_that_is_held_is_not_assigned_or_adopted_again(message: str) -> None:
    held = HeldCalls(100)
    stream = held.open(assign("a"))
    held.decoded(stream, chunk((1, 2)))
    with pytest.raises(ProtocolError, match="assigned a twice" if message == "assign" else "adopted a, which is not"):
        if message == "assign":
            held.open(assign("a"))
        else:
            held.adopt(Adopt(held="a", call_id="a", offset=0, prefix=prefix(())))
    assert held._streams.get("a") is stream and stream.num_held == 2


def test_an_offer_that_nobody_takes_up_is_forgotten_after_its_time() -> None:
    held = HeldCalls(100, offer_s=900.0)
    for name in "ab":
        held.open(assign(name))
    held.connected(100.0)
    held.adopt(Adopt(held="b", call_id="b", offset=0, prefix=prefix(())))
    assert held.expired(1000.0) == []
    assert held.expired(1001.0) == ["a"]


def test_a_hello_names_no_more_calls_than_a_coordinator_reads() -> None:
    held = HeldCalls(100)
    for number in range(MAX_HELD_CALLS + 1):
        held.open(assign(f"{number}"))
    assert [call.call_id for call in held.listed()] == [f"{number}" for number in range(MAX_HELD_CALLS)]


def test_what_is_acknowledged_is_not_sent_any_more() -> None:
    held = HeldCalls(100)
    stream = held.open(assign("a"))
    held.decoded(stream, chunk(tuple(range(6))))
    held.acked("a", 4)
    message = held.next_message()
    assert isinstance(message, Decoded)
    assert (message.offset, unpack_ids(message.token_ids)) == (4, (4, 5))


# -- versions that a hello names ---------------------------------------------------------------------------------------


def test_a_version_is_named_as_long_as_tokens_of_it_are_held() -> None:
    held = HeldCalls(1000)
    served = ServedHeads(held)
    for version in (7, 8):
        served.add(head(version))
    assert served.needed() == (head(8),)
    stream = held.open(assign("a"))
    held.decoded(stream, chunk((5,), 7))
    assert served.needed() == (head(7), head(8))


def test_a_later_epoch_names_no_version_that_it_has_not_made() -> None:
    served = ServedHeads(HeldCalls(1000))
    for each in (head(7), head(8), head(6, epoch=2), head(7, epoch=2)):
        served.add(each)
    assert served.needed() == (head(7, epoch=2),)
    assert head(8) not in served.needed()


def test_new_tokens_of_a_run_that_went_back_name_none_of_its_earlier_epochs() -> None:
    held = HeldCalls(1000)
    served = ServedHeads(held)
    for each in (head(6), head(7), head(6, epoch=2)):
        served.add(each)
    held.decoded(held.open(assign("a")), chunk((5,), 6))
    assert served.needed() == (head(6, epoch=2),), "else all that the worker holds is released"


def test_no_more_are_kept_than_a_coordinator_remembers() -> None:
    held = HeldCalls(1000)
    served = ServedHeads(held)
    stream = held.open(assign("a"))
    held.decoded(stream, chunk((5,), 0))
    for version in range(100):
        served.add(head(version))
    assert len(served.needed()) == 64
