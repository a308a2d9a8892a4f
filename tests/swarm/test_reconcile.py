"""Messages that are lost, doubled, delayed and reordered: the heartbeats make it good, whatever it was.

The coordinator is the real one, and so is what the workers hold. Frames of both directions go through a channel that
does with them what it likes; only the greeting is safe, since a connection without one is given up by both sides.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from rollover.swarm.coordinator.machine.effects import CheckLogprobs, Close, Deliver, Effect, Fail, Send
from rollover.swarm.coordinator.machine.reconcile import MAX_REPAIRS
from rollover.swarm.wire.messages import (
    Abort,
    Ack,
    Adopt,
    Assign,
    Beat,
    CallState,
    Decoded,
    Goodbye,
    Head,
    Ready,
    Release,
    Serving,
    Welcome,
    pack_ids,
    pack_logprobs,
)
from rollover.types import FinishReason
from tests.swarm.held_worker import HeldWorker
from tests.swarm.kit import LENGTH, DrivenSwarm, coordinator, head, plain, request, response

NUM_ROUNDS = 60
"""Heartbeats without loss in which everything must have come to its end."""


# -- each kind of loss by itself ------------------------------------------------------------------------------------


class Pair:
    """A coordinator and one worker. What ``lost`` names does not arrive, the first ``num`` times."""

    def __init__(self, **changes: Any) -> None:
        self.hub, self.worker = coordinator(**changes), HeldWorker("a")
        self.lost: dict[type, int] = {}
        self.tokens: list[int] = []
        self.ends: list[str] = []
        self.sent: list[Any] = []
        self.checks: list[int] = []

    def drops(self, message: object) -> bool:
        left = self.lost.get(type(message), 0)
        self.lost[type(message)] = left - 1
        return left > 0

    def connect(self) -> None:
        effects = self.hub.connected("a", self.worker.hello(), 0.0)
        (welcome,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Welcome)]
        for message in self.worker.welcomed(welcome):
            self.up(message)
        self.perform([e for e in effects if not (isinstance(e, Send) and e.message is welcome)])

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Deliver(_, piece, _):
                    assert piece.offset == len(self.tokens)
                    self.tokens += piece.token_ids
                    if piece.finish_reason is not None:
                        self.ends.append(piece.finish_reason.value)
                case Fail(_, reason):
                    self.ends.append(reason)
                case CheckLogprobs(_, version):
                    self.checks.append(version)
                case Send(_, message):
                    self.sent.append(message)
                    if not self.drops(message):
                        for answer in self.worker.got(message):
                            self.up(answer)

    def up(self, message: Any) -> None:
        if not self.drops(message):
            self.perform(self.hub.received(self.worker.lease, message, 1.0))

    def work(self, num_tokens: int = 0) -> None:
        self.worker.decode(num_tokens)
        for message in self.worker.outgoing():
            self.up(message)

    def beat(self, times: int = 1) -> None:
        for _ in range(times):
            self.up(self.worker.heartbeat())

    def all(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


def joined(**changes: Any) -> Pair:
    pair = Pair(**changes)
    pair.connect()
    return pair


def test_a_lost_ready_and_a_lost_serving_are_told_by_the_next_heartbeat() -> None:
    pair = Pair(checks=True)
    pair.lost = {Ready: 1, Serving: 1}
    pair.connect()
    assert pair.hub.max_running == 0
    pair.beat()
    member = pair.hub.members["a"]
    assert (member.version, member.ready, pair.checks) == (0, pair.worker.ready(), [0])
    pair.beat()
    assert pair.checks == [0], "it is no news any more"


def test_a_lost_head_is_in_the_answer_to_the_next_heartbeat() -> None:
    pair = joined()
    pair.lost = {Head: 1}
    pair.perform(pair.hub.published(head(1), 0.0))
    pair.beat()
    assert pair.worker.newest == head(1)


def test_a_lost_assignment_is_repeated_after_two_heartbeats() -> None:
    pair = joined()
    pair.lost = {Assign: 1}
    pair.perform(pair.hub.opened(request("g0.0")))
    pair.beat()
    assert len(pair.all(Assign)) == 1, "the heartbeat may have crossed it"
    pair.beat()
    assert len(pair.all(Assign)) == 2
    pair.work(LENGTH)
    assert tuple(pair.tokens) == response("g0.0.") and pair.hub.counters.repairs == {"assign": 1}


def test_an_assignment_that_never_arrives_lets_the_call_fail() -> None:
    pair = joined()
    pair.lost = {Assign: 100}
    pair.perform(pair.hub.opened(request("g0.0")))
    pair.beat(2 * MAX_REPAIRS)
    assert pair.ends == []
    pair.beat(2)
    assert pair.ends == ["a and the coordinator cannot agree on what it holds of the call"]
    assert pair.hub.members["a"].calls == set()


def test_lost_tokens_are_sent_again() -> None:
    pair = joined()
    pair.perform(pair.hub.opened(request("g0.0")))
    pair.lost = {Decoded: 1}
    pair.work(10)
    pair.work(10)
    assert pair.tokens == []
    pair.beat(2)
    pair.work()
    assert tuple(pair.tokens) == response("g0.0.", 0, 20)


def test_tokens_that_are_still_to_be_sent_are_not_asked_for() -> None:
    pair = joined()
    pair.perform(pair.hub.opened(request("g0.0")))
    pair.worker.decode(10)
    pair.beat(5)
    assert pair.all(Adopt) == []


def test_a_stream_that_moves_on_between_two_heartbeats_is_not_asked_for_again() -> None:
    pair = joined()
    pair.perform(pair.hub.opened(request("g0.0")))
    under_way: list[Any] = []
    for _ in range(6):
        pair.worker.decode(5)
        under_way += pair.worker.outgoing()
        pair.beat()  # it overtakes the tokens
        pair.up(under_way.pop(0))
    assert pair.all(Adopt) == [] and len(pair.tokens) == 30


def test_a_lost_end_is_sent_again() -> None:
    for reason in ("length", "abort"):
        pair = joined()
        pair.perform(pair.hub.opened(request("g0.0")))
        pair.work(10)
        if reason == "abort":
            pair.perform(pair.hub.aborted(["g0.0#0."]))
        pair.lost = {Decoded: 1}
        pair.work(LENGTH)
        assert pair.ends == []
        pair.beat(2)
        pair.work()
        assert pair.ends == [reason]


def test_a_lost_abort_is_repeated() -> None:
    pair = joined()
    pair.perform(pair.hub.opened(request("g0.0")))
    pair.lost = {Abort: 1}
    pair.perform(pair.hub.aborted(["g0.0#0."]))
    pair.work(10)
    pair.beat()
    pair.work(10)
    pair.beat()
    pair.work()
    assert pair.ends == ["abort"] and len(pair.tokens) == 20


def test_a_lost_acknowledgement_is_repeated_and_a_lost_last_one_becomes_a_release() -> None:
    pair = joined()
    pair.perform(pair.hub.opened(request("g0.0")))
    pair.work(10)
    pair.lost = {Ack: 2}
    pair.perform(pair.hub.journaled("g0.0.", 10))
    pair.beat(1)
    pair.work(5)
    pair.beat(1)
    assert pair.all(Ack) == [Ack(call_id="g0.0#0.", offset=10)] * 2
    pair.beat(2)
    assert pair.worker.held.num_tokens == 5
    pair.work(LENGTH)
    pair.lost = {Ack: 1}
    pair.perform(pair.hub.journaled("g0.0.", LENGTH))
    assert len(pair.worker.held) == 1
    pair.beat(2)
    assert len(pair.worker.held) == 0 and pair.all(Release) == [Release(call_ids=("g0.0#0.",))]


def test_a_lost_release_is_repeated() -> None:
    pair = joined()
    pair.perform(pair.hub.opened(request("g0.0")))
    pair.lost = {Release: 1}
    pair.perform(pair.hub.cut(["g0.0#0."]))
    pair.beat(2)
    assert len(pair.worker.held) == 0 and pair.worker.running == {}


def test_a_lost_adoption_is_repeated_under_the_same_and_under_another_name() -> None:
    for restarted in (False, True):
        pair = joined()
        pair.perform(pair.hub.opened(request("g0.0")))
        pair.work(10)
        pair.lost = {Adopt: 1}
        if restarted:
            pair.hub, pair.tokens = coordinator(), pair.tokens[:4]
        pair.connect()
        if restarted:
            pair.perform(pair.hub.opened(request("g0.0", 1, num_done=4)))
        assert len(pair.all(Adopt)) == 1
        pair.work(10)
        pair.beat(2)
        assert pair.all(Adopt)[0] == pair.all(Adopt)[1]
        pair.work(LENGTH)
        assert tuple(pair.tokens) == response("g0.0.") and pair.ends == ["length"]


def test_an_offer_that_the_coordinator_knows_nothing_of_is_released_and_one_that_may_be_wanted_is_kept() -> None:
    pair = joined()
    pair.perform(pair.hub.opened(request("g0.0")))
    pair.work(10)
    pair.hub = coordinator()
    pair.connect()
    pair.beat(6)
    assert len(pair.worker.held) == 1, "its sample may be opened yet"
    pair.hub.members["a"].held.clear()
    pair.beat(2)
    assert len(pair.worker.held) == 0


def test_tokens_of_a_version_whose_news_was_lost_are_refused_and_come_again_once_it_is_known() -> None:
    pair = joined()
    pair.perform(pair.hub.opened(request("g0.0")))
    pair.perform(pair.hub.published(head(1), 0.0))
    assert [type(m) for m in pair.worker.change()] == [Serving], "and it is lost"
    pair.work(10)
    assert pair.tokens == [] and pair.hub.counters.unconfirmed_tokens == 10
    pair.beat(2)
    pair.work()
    assert len(pair.tokens) == 10 and not pair.hub.members["a"].distrust


def test_tokens_of_a_version_between_two_that_are_known_are_confirmed_by_what_the_worker_holds() -> None:
    pair = joined()
    pair.perform(pair.hub.opened(request("g0.0")))
    for version in (1, 2):
        pair.perform(pair.hub.published(head(version), 0.0))
        news = pair.worker.change()
        pair.worker.decode(10)
    for message in news:
        pair.up(message)
    pair.work()
    assert pair.tokens == [], "those of version 1 come first"
    pair.beat(2)
    pair.work()
    assert len(pair.tokens) == 20


def test_who_sends_tokens_of_a_version_that_it_does_not_say_it_has_served_is_sent_away() -> None:
    pair = joined()
    pair.perform(pair.hub.opened(request("g0.0")))
    pair.hub.published(head(1), 0.0)
    ids, logprobs = pack_ids(response("g0.0.", 0, 3)), pack_logprobs([-0.5] * 3)
    lie = Decoded(call_id="g0.0#0.", offset=0, token_ids=ids, logprobs=logprobs, version=1, kv_version=1)
    pair.up(lie)
    beat = pair.worker.heartbeat()
    before = type(beat)(**{f: getattr(beat, f) for f in beat.__struct_fields__} | {"calls": ()})
    pair.up(before)
    assert not pair.hub.members["a"].distrust, "that heartbeat may be older"
    states = (CallState(call_id="g0.0#0.", start=0, sent=3),)
    after = type(beat)(**{f: getattr(beat, f) for f in beat.__struct_fields__} | {"calls": states, "number": 2})
    pair.up(after)
    assert "it sent tokens of version 1, which it has not confirmed to serve" in pair.hub.members["a"].distrust
    assert pair.tokens == [] and any(isinstance(m, Goodbye) and m.is_final for m in pair.sent)


def test_a_heartbeat_that_comes_twice_or_late_proves_nothing_but_is_answered() -> None:
    pair = joined()
    pair.lost = {Assign: 1}
    pair.perform(pair.hub.opened(request("g0.0")))
    first = pair.worker.heartbeat()
    second = pair.worker.heartbeat()
    for message in (second, second, first):
        pair.up(message)
    assert len(pair.all(Assign)) == 1
    assert [m.number for m in pair.all(Beat)] == [2, 2, 1]


def test_a_heartbeat_that_does_not_name_all_calls_says_nothing_of_the_others() -> None:
    pair = joined()
    pair.lost = {Assign: 1}
    pair.perform(pair.hub.opened(request("g0.0")))
    for _ in range(8):
        beat = pair.worker.heartbeat()
        part = {f: getattr(beat, f) for f in beat.__struct_fields__} | {"has_all_calls": False}
        pair.up(type(beat)(**part))
    assert len(pair.all(Assign)) == 1 and pair.ends == []


# -- everything at once ------------------------------------------------------------------------------------------------


class LossySwarm(DrivenSwarm):
    """Samples are driven to their end over a channel that loses, doubles, delays and reorders what it carries.

    Tokens are written down now and then; a coordinator that starts again knows only those.
    """

    names = st.sampled_from("ab")

    def __init__(self) -> None:
        super().__init__()
        self.workers = {name: HeldWorker(name) for name in "ab"}
        self.up: dict[str, list[tuple[int, Any]]] = {name: [] for name in "ab"}
        self.down: dict[str, list[tuple[int, Any]]] = {name: [] for name in "ab"}
        self.connected: set[str] = set()
        self.journaled: dict[str, int] = {}

    # -- the shell ------------------------------------------------------------------------------------------------

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Deliver(call_id, piece, _):
                    sample = self.open[call_id]
                    assert piece.offset == len(self.done[sample])
                    if piece.token_ids:
                        assert piece.version >= self.least[sample]
                    self.done[sample] += piece.token_ids
                    if piece.finish_reason is not None:
                        del self.open[call_id]
                        if piece.finish_reason is not FinishReason.ABORT:
                            self.finished.add(sample)
                case Fail(call_id, _):
                    del self.open[call_id]
                case Send(lease, message):
                    assert not isinstance(message, Goodbye) or "has not been heard from" in message.reason
                    for worker in self.workers.values():
                        if worker.lease == lease and worker.name in self.connected:
                            self.down[worker.name].append((lease, message))
                case Close(lease):
                    for worker in self.workers.values():
                        if worker.lease == lease:
                            self.cut(worker.name)

    def cut(self, name: str) -> None:
        self.connected.discard(name)
        self.up[name], self.down[name] = [], []

    def post(self, name: str, messages: list[Any]) -> None:
        if name in self.connected:
            self.up[name] += [(self.workers[name].lease, m) for m in messages]

    def arrive(self, name: str, direction: str, index: int, *, stays: bool) -> None:
        under_way = self.up[name] if direction == "up" else self.down[name]
        if not under_way:
            return
        index %= len(under_way)
        lease, message = under_way[index] if stays else under_way.pop(index)
        worker = self.workers[name]
        if direction == "up":
            self.perform(self.hub.received(lease, message, self.now_s))
        elif lease == worker.lease:
            self.post(name, worker.got(message))

    # -- what happens ---------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        for name in "ab":
            self.connect(name, anew=False)
            self.deliver(name)

    @rule(name=names, what=st.sampled_from(["dial", "dial", "anew", "cut", "restart", "wait"]))
    def upheaval(self, name: str, what: str) -> None:
        if what == "restart":
            self.restart_the_coordinator()
        elif what == "cut":
            self.disconnect(name)
        elif what == "wait":
            self.wait(16.0)
        else:
            self.connect(name, anew=what == "anew")

    def connect(self, name: str, anew: bool) -> None:
        if anew:
            self.workers[name] = HeldWorker(name)
        worker = self.workers[name]
        worker.now_s = self.now_s
        effects = self.hub.connected(name, worker.hello(), self.now_s)
        (welcome,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Welcome)]
        self.cut(name)
        self.connected.add(name)
        self.post(name, worker.welcomed(welcome))
        goodbye = (Welcome, Goodbye)
        self.perform([e for e in effects if not (isinstance(e, Send) and isinstance(e.message, goodbye))])
        self.connected.add(name)

    @rule(name=names, direction=st.sampled_from(["up", "down"]), index=st.integers(0, 9), stays=st.booleans())
    def arrives(self, name: str, direction: str, index: int, stays: bool) -> None:
        """Any message that is under way arrives, and perhaps will again."""
        self.arrive(name, direction, index, stays=stays)

    @rule(name=names, direction=st.sampled_from(["up", "down"]), lost=st.lists(st.booleans(), min_size=1, max_size=4))
    def are_lost(self, name: str, direction: str, lost: list[bool]) -> None:
        """Of those under way, some never arrive."""
        queues = self.up if direction == "up" else self.down
        queues[name] = [each for i, each in enumerate(queues[name]) if not lost[i % len(lost)]]

    @rule(number=st.integers(0, 3), lost=st.booleans(), num_tokens=st.integers(1, 30))
    def begin_one(self, number: int, lost: bool, num_tokens: int) -> None:
        """A call is opened, and its member decodes; its assignment or its tokens are lost."""
        self.start(number)
        for name in "ab":
            if lost:
                self.down[name].clear()
            self.deliver(name)
            self.decode(name, num_tokens)
            if not lost:
                self.up[name] = self.up[name][1:]

    @rule(name=names)
    def deliver(self, name: str) -> None:
        while self.up[name] or self.down[name]:
            for direction in ("up", "down"):
                self.arrive(name, direction, 0, stays=False)

    def disconnect(self, name: str) -> None:
        if name in self.connected:
            self.cut(name)
            self.perform(self.hub.disconnected(self.workers[name].lease, self.now_s))

    @rule(name=names, num_tokens=st.integers(0, 25))
    def decode(self, name: str, num_tokens: int) -> None:
        self.workers[name].decode(num_tokens)
        if name in self.connected:
            self.post(name, self.workers[name].outgoing())

    @rule(name=names)
    def beat(self, name: str) -> None:
        if name in self.connected:
            self.post(name, [self.workers[name].heartbeat()])

    @rule(name=names, lost=st.booleans())
    def change(self, name: str, lost: bool) -> None:
        if name in self.connected:
            news = self.workers[name].change()
            self.post(name, [] if lost else news)

    @rule(step_s=st.sampled_from([1.0, 4.0]))
    def wait(self, step_s: float) -> None:
        self.now_s += step_s
        for worker in self.workers.values():
            worker.now_s = self.now_s
        self.perform(self.hub.expire(self.now_s))

    @rule(number=st.integers(0, 3))
    def start(self, number: int) -> None:
        sample = f"g{number}.0"
        if sample in self.finished or sample in self.open.values():
            return
        self.done.setdefault(sample, [])
        least = self.least.get(sample)
        if least is None:
            least = self.hub.reserve(f"{sample}.", 0, LENGTH, until_s=self.now_s + 60.0)
            if least is None:
                return
            self.least[sample] = least
        self.journal(sample)
        if len(self.done[sample]) == LENGTH:  # its end was lost with the coordinator that had it
            self.finished.add(sample)
            return
        self.num_calls += 1
        call = request(sample, self.num_calls, num_done=len(self.done[sample]), least_version=least)
        self.open[call.request_id] = sample
        self.perform(self.hub.opened(call))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.perform(self.hub.cut([data.draw(st.sampled_from(sorted(self.open)))]))

    @precondition(lambda self: self.done)
    @rule(data=st.data())
    def write_down(self, data: st.DataObject) -> None:
        self.journal(data.draw(st.sampled_from(sorted(self.done))))

    def journal(self, sample: str) -> None:
        self.journaled[sample] = len(self.done[sample])
        self.perform(self.hub.journaled(f"{sample}.", self.journaled[sample]))

    def restart_the_coordinator(self) -> None:
        version = self.hub.head.version
        self.hub = coordinator()
        for v in range(1, version + 1):
            self.hub.published(head(v), self.now_s)
        for name in "ab":
            self.cut(name)
        self.open.clear()
        for sample, tokens in self.done.items():
            del tokens[self.journaled.get(sample, 0) :]
            if len(tokens) < LENGTH:
                self.finished.discard(sample)

    # -- laws -----------------------------------------------------------------------------------------------------

    @invariant()
    def what_a_worker_was_told_to_let_go_is_written_down(self) -> None:
        for worker in self.workers.values():
            for stream in worker.held:
                sample = plain(stream.assign.sample_key)[:-1]
                assert stream.start <= max(stream.origin, self.journaled.get(sample, 0))

    @invariant()
    def nobody_is_sent_away_for_what_the_network_did(self) -> None:
        assert not any(member.distrust for member in self.hub.members.values())

    def teardown(self) -> None:
        """Once nothing is lost any more, all ends: heartbeats alone have to find out what was."""
        for _ in range(NUM_ROUNDS):
            self.round()
            if self.finished == self.done.keys() and not self.held():
                break
        assert self.finished == self.done.keys(), f"{self.done.keys() - self.finished} were never finished"
        self.now_s += 901.0  # what nobody asked for again after a restart is forgotten
        for name in "ab":
            self.connect(name, anew=False)
        for _ in range(3):
            self.now_s += 901.0
            for worker in self.workers.values():
                worker.now_s = self.now_s
            for name in "ab":
                self.beat(name)
                self.deliver(name)
        assert self.held() == 0 and len(self.hub._calls.acknowledgements) == 0

    def held(self) -> int:
        return sum(len(worker.held) for worker in self.workers.values())

    def round(self) -> None:
        self.wait(5.0)
        for name in "ab":
            if name not in self.connected:
                self.connect(name, anew=False)
            self.deliver(name)
            self.change(name, lost=False)
            self.decode(name, LENGTH)
            self.beat(name)
            self.deliver(name)
        for sample in list(self.done):
            self.start(int(sample[1:-2]))
            self.journal(sample)


TestLossySwarm = LossySwarm.TestCase
TestLossySwarm.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_call_that_ended_by_an_abort_whose_end_was_lost_is_not_decoded_on(restarted: bool) -> None:
    """Unless it was offered and taken up: then it is wanted again."""
    pair = joined()
    pair.perform(pair.hub.opened(request("g0.0")))
    pair.work(10)
    pair.lost = {Decoded: 1}
    pair.perform(pair.hub.aborted(["g0.0#0."]))
    pair.work()
    assert pair.ends == [] and pair.worker.running == {}
    if restarted:
        pair.hub = coordinator()
        pair.connect()
        pair.perform(pair.hub.opened(request("g0.0", 1, num_done=10)))
        pair.work(LENGTH)
        assert pair.ends == ["length"]
    else:
        pair.beat(2)
        pair.work(LENGTH)
        assert pair.ends == ["abort"] and len(pair.tokens) == 10
